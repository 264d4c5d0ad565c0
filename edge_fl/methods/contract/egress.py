"""What a method lets leave the devices of each tier, from its own declarations."""

from __future__ import annotations

from edge_fl.methods.contract import norm
from edge_fl.methods.contract.method import Method
from edge_fl.wire.egress import NUMBERS, Egress, of_head


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
    )


def of_method(method: Method) -> list[Egress]:
    """One list per tier that the method allows."""
    tier = method.head_tier
    return [of_full(method), *([of_head(method.head_updates())] if tier.kind != "none" else [])]
