"""The head plan of a release: how the method's own head is fitted, and which head updates a device may send.

It is part of the signed manifest and uses closed lists of words, so a server cannot request anything else.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Way = Literal["own", "tuned", "mixed", "ridge", "gated", "ensemble", "cosine"]
"""How a method's own linear head is fitted (`edge_fl.heads.WAYS`).

"own": like any logistic regression; "cosine": for a backbone that was not trained as a whole.
"""

Serves = Literal["fleet", "way"]
"""Which head devices serve: the fleet's head, adapted to their labels, or the method's own."""

HeadUpdateKind = Literal[
    "taught_head", "trained_head", "half_head", "fitted_head", "class_means", "ridge_sums", "spread"
]
"""Kinds of head updates (`edge_fl.heads.head_updates.HEAD_UPDATES`)."""

Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}\Z")]
Number = Annotated[float, Meta(ge=0, le=1e9)]


class HeadPlan(Struct, frozen=True, forbid_unknown_fields=True):
    """`fleet` names the extra with the fleet's head ("": the release has none), `shares` are the class shares of the data that it was
    fitted on (none: unknown). `serves`: whether devices adapt it (`edge_fl.heads.served`), or fit the method's own head in its `way`.

    `start` names the extra from which a linear head starts, scaled by `times`; `uploads` maps parts to kinds of head updates.

    The numbers are settings of SGD: all batches of every epoch, and at least `min_steps` (0: exactly the epochs); with `batches` above 0
    only that many batches, the same in each epoch. `pull` is the weight λ of λ/2 |h - start|², `ridge` that of a closed form.
    """

    way: Way = "own"
    serves: Serves = "fleet"
    fleet: Annotated[str, Meta(pattern=r"^([a-z0-9][a-z0-9_-]{0,31})?\Z")] = ""
    shares: Annotated[list[Annotated[float, Meta(ge=0, le=1)]], Meta(max_length=65536)] = []
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
    uploads: Annotated[dict[Name, HeadUpdateKind], Meta(max_length=8)] = {}


PLAIN = HeadPlan()
"""The default: fit a head, send nothing."""
