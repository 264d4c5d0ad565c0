"""The precision of computations inside network parts during training: float32, bfloat16 or float16.

Parameters, features, losses, statistics and means stay float32; so do evaluation and export.
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
    """Context in which parts compute in `precision`, a key of PRECISIONS, by torch.autocast."""
    token = _dtype.set(PRECISIONS[precision])
    try:
        yield
    finally:
        _dtype.reset(token)


def current() -> torch.dtype | None:
    """The current reduced precision, or None for float32."""
    return _dtype.get()
