"""The least protection with which a device takes part in secure sums, whatever the server asks for; the owner's settings alone."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from edge_fl.errors import SecureSumError
from edge_fl.failures import Failure
from edge_fl.wire.messages import MAX_SUM_DEVICES, SumRequest

ROUNDING = 1e-9


class SumFloors(Struct, frozen=True, forbid_unknown_fields=True):
    """`minimum`, `threshold` and `noise_multiplier` of a request are at least these; its `clip` is at most this one (0: any, or none).

    A server that deviates from the protocol learns single vectors with 2t - n colluders of n devices, t = threshold * n: 1 of 99 with
    0.501, 33 with two thirds.
    """

    minimum: Annotated[int, Meta(ge=3, le=MAX_SUM_DEVICES)] = 5
    threshold: Annotated[float, Meta(gt=0.5, le=1)] = 2 / 3
    clip: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    noise_multiplier: Annotated[float, Meta(ge=0, le=1e6)] = 0.0

    def require(self, request: SumRequest) -> None:
        """Raise SecureSumError ("below_floor") for terms that protect less."""
        below = []
        if request.minimum < self.minimum:
            below.append(f"minimum {request.minimum}, expected {self.minimum} or more")
        if request.threshold < self.threshold - ROUNDING:
            below.append(f"threshold {request.threshold:.4g}, expected {self.threshold:.4g} or more")
        if self.clip and not 0 < request.clip <= self.clip:
            below.append(f"clip {request.clip:g}, expected above 0 and at most {self.clip:g}")
        if request.noise_multiplier < self.noise_multiplier:
            below.append(
                f"noise_multiplier {request.noise_multiplier:g}, expected {self.noise_multiplier:g} or more"
            )
        if below:
            raise SecureSumError(f"{'; '.join(below)} (this device's settings, [sums])", Failure.BELOW_FLOOR)

    def __str__(self) -> str:
        parts = [f"at least {self.minimum} devices, of which {self.threshold:.1%} must remain"]
        parts += [f"clip at most {self.clip:g}"] if self.clip else []
        parts += [f"noise_multiplier at least {self.noise_multiplier:g}"] if self.noise_multiplier else []
        return ", ".join(parts)


DEFAULT = SumFloors()
