"""The precision that networks compute in while they train: float32, or half of it where a processor is faster at that.

Only what happens inside a `Part` is rounded: parameters, features, losses, statistics and means stay float32, and so does everything
when a model is evaluated or exported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

_dtype: ContextVar[torch.dtype | None] = ContextVar("precision", default=None)


@contextmanager
def computing_in(precision: str) -> Iterator[None]:
    """Parts that are called in here compute in `precision`, a key of PRECISIONS, by torch.autocast."""
    token = _dtype.set(PRECISIONS[precision])
    try:
        yield
    finally:
        _dtype.reset(token)


def current() -> torch.dtype | None:
    """What parts round to now; None for nothing."""
    return _dtype.get()
