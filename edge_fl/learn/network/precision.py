"""The precision of computations inside network parts during training: float32, bfloat16 or float16.

Parameters, features, losses, statistics and means stay float32; so do evaluation and export.

On a CPU, float16 takes ten to a hundred times as long as float32, and bfloat16 about five times where the processor has no instructions
for it.
"""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from edge_fl.errors import ConfigError

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


def require_trainable(precision: str, device: str) -> None:
    """Raise ConfigError for float16 on a CPU."""
    if precision == "fp16" and torch.device(device).type == "cpu":
        raise ConfigError(
            'precision = "fp16": at least ten times slower than fp32 on a CPU; expected fp32 or bf16 there, or a GPU'
        )


def slowdown(precision: str, device: str) -> str:
    """Warning that training in `precision` is slower than in float32 on this device, and what to set instead; empty if it is not."""
    if precision != "bf16" or torch.device(device).type != "cpu" or _computes_bf16():
        return ""
    return (
        'precision = "bf16": this processor has no bf16 instructions, so that a step takes about five times as long as in fp32; '
        'set precision = "fp32"'
    )


def _computes_bf16() -> bool:
    """Whether the processor has bf16 instructions that torch uses; oneDNN alone also reports those that it emulates with AVX-512."""
    instructions = platform.machine() != "x86_64" or torch.cpu._is_avx512_bf16_supported()
    return bool(instructions and torch.ops.mkldnn._is_mkldnn_bf16_supported())
