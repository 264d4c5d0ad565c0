"""From a method to the plan that its releases carry for head-only devices: METHODS.md 6.2 in the words of the manifest."""

from __future__ import annotations

from typing import Any

from edge_fl.heads.plan import HeadPlan
from edge_fl.methods.contract.method import Method

STEPS = 300  # a few epochs are too few steps on a small device (METHODS.md section 5)


def head_plan(method: Method, batch_size: int, *, collect: bool = True) -> HeadPlan:
    """What heads on this method's features are to do; without `collect` nothing is sent back.

    The optimiser's numbers are the method's own, its momentum 0 where it has none (Adam): devices descend by SGD.
    """
    tier = method.head_tier
    fields: dict[str, Any] = {
        "lr": method.optimiser.lr,
        "momentum": getattr(method.optimiser, "momentum", 0.0),
        "weight_decay": method.optimiser.weight_decay,
        "epochs": method.epochs,
        "min_steps": STEPS,
        "batch_size": batch_size,
        **{name: _number(method, value) for name, value in tier.numbers.items()},
    }
    uploads = dict(method.uploads()) if collect else {}
    start = tier.start if tier.start in tier.extras else ""
    return HeadPlan(way=tier.way, start=start, uploads=uploads, **fields)


def _number(method: Method, value: str | float) -> float:
    """A hyper-parameter by name, or the number itself."""
    if not isinstance(value, str):
        return value
    return getattr(method, value)  # type: ignore[no-any-return]
