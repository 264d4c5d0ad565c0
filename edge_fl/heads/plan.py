"""What a release asks of heads beyond fitting them: how the method's own head is found, and what a device may send back.

It stands in the signed manifest, in words from closed lists, so that no server can ask a device for anything else.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Way = Literal["own", "tuned", "mixed", "ridge", "gated", "ensemble"]
"""How a method's own linear head is found (`edge_fl.heads.WAYS`); "own": like any logistic regression."""

Share = Literal[
    "taught_head", "trained_head", "half_head", "fitted_head", "class_means", "ridge_sums", "spread"
]
"""What a device may send back (`edge_fl.heads.shares.SHARES`)."""

Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}\Z")]
Number = Annotated[float, Meta(ge=0, le=1e9)]


class HeadPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """`start` names the extra that a linear head starts from, `start` times `times`; `uploads` what may leave, by the part it becomes.

    The numbers are those of descent: every batch of every epoch, and at least `min_steps` (0: exactly the epochs); with `batches` above 0
    only so many batches, the same in each epoch. `pull` is the weight λ of λ/2 |h - start|², `ridge` that of a closed form.
    """

    way: Way = "own"
    start: str = ""
    times: Number = 1.0
    lr: Number = 0.05
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    weight_decay: Number = 0.0
    batch_size: Annotated[int, Meta(ge=1, le=2**20)] = 32
    batches: Annotated[int, Meta(ge=0, le=2**20)] = 0
    epochs: Annotated[int, Meta(ge=0, le=10_000)] = 1
    min_steps: Annotated[int, Meta(ge=0, le=100_000)] = 0
    pull: Number = 0.0
    mixing: Number = 1.0
    ridge: Number = 1e-3
    uploads: Annotated[dict[Name, Share], Meta(max_length=8)] = {}


PLAIN = HeadPlan()
"""Nothing beyond fitting a head."""
