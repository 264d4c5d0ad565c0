"""The head plan that a method's releases carry for head-only devices (docs/methods-on-devices.md, "Device tiers")."""

from typing import Any

from edge_fl.heads.plan import HeadPlan, Serves
from edge_fl.methods.contract import norm
from edge_fl.methods.contract.method import HeadTier, Method
from edge_fl.wire.egress import NUMBERS, SUMS, Egress, of_head

STEPS = 300  # lower bound: a few epochs over a small data set are too few steps (docs/methods-on-devices.md, "Heads")


FLEETS_HEADS = ("head", "global_head", "prior", "prototypes")
"""Names of extras that are a fleet's head (`edge_fl.heads.fleet`), the first one of a method counts."""


def fleets_head(tier: HeadTier) -> str:
    """The extra of a tier that is a fleet's head; "" if its releases have none of their own."""
    return next((name for name in FLEETS_HEADS if name in tier.extras), "")


def head_plan(method: Method, batch_size: int, *, collect: bool = True, serves: Serves = "fleet") -> HeadPlan:
    """How devices fit heads on this method's features, and which head updates they send (none without `collect`).

    Devices use SGD with the method's learning rate and weight decay; momentum is 0 if the method's optimiser has none (Adam).
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
    uploads = dict(method.head_updates()) if collect else {}
    start = tier.start if tier.start in tier.extras else ""
    return HeadPlan(
        way=tier.way, serves=serves, fleet=fleets_head(tier), start=start, uploads=uploads, **fields
    )


def _number(method: Method, value: str | float) -> float:
    if not isinstance(value, str):
        return value
    return getattr(method, value)  # type: ignore[no-any-return]


def of_full(method: Method) -> Egress:
    """What may leave a device that trains: the shared parts that it sends with the BatchNorm statistics that an export needs, and
    the metrics that the method declares (`Method.measures`).
    """
    sent = [name for name in method.sent() if method.parts[name].travels]
    parts = sorted([*sent, *(name + norm.EXPORT for name in sent)])
    own = () if method.privacy.noise_multiplier else method.measures  # no noise is added to them
    return Egress(
        "full",
        {"update": parts, "personal": parts},
        method.compression,
        method.privacy,
        numbers=(*NUMBERS, *own),
        sums=SUMS if method.exports and not method.privacy.noise_multiplier else {},
    )


def of_method(method: Method) -> list[Egress]:
    """One list per tier that the method allows."""
    tier = method.head_tier
    return [of_full(method), *([of_head(method.head_updates())] if tier.kind != "none" else [])]
