"""Random numbers as pure functions of a key: the same bits in a plain loop, under vmap, on a GPU and on a device.

A key is an int64 scalar tensor; numbers are hashes of key + counter by splitmix64 (Steele, Lea and Flood, OOPSLA 2014). There is no
global state.
"""

import math

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_A = 0xBF58476D1CE4E5B9 - 2**64
_MIX_B = 0x94D049BB133111EB - 2**64


def key_of(seed: int) -> Tensor:
    """The key for a seed from `edge_fl.seeds`."""
    return torch.tensor(seed, dtype=torch.int64)


def fold(key: Tensor, number: int | Tensor) -> Tensor:
    """A new key from a key and a number (a step, a purpose)."""
    offset = _wrapped(_GOLDEN * (number + 1)) if isinstance(number, int) else _GOLDEN * (number + 1)
    return _mix(key + offset)


def uniform(key: Tensor, *shape: int) -> Tensor:
    """float32 in [0, 1), 24 random bits each."""
    counter = torch.arange(math.prod(shape), dtype=torch.int64, device=key.device).reshape(shape)
    return _shift(_mix(key + _GOLDEN * (counter + 1)), 40).to(torch.float32) * 2.0**-24


def normal(key: Tensor, *shape: int) -> Tensor:
    """Standard normal float32 (Box and Muller)."""
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform(fold(key, 0), *shape)))
    return radius * torch.cos(2.0 * math.pi * uniform(fold(key, 1), *shape))


def gumbel(key: Tensor, *shape: int) -> Tensor:
    """Standard Gumbel float32; added to logits, its argmax is a draw from their softmax."""
    return -torch.log(-torch.log(uniform(key, *shape).clamp(min=2.0**-25)))


def dropout(key: Tensor, x: Tensor, rate: float) -> Tensor:
    """Inverted dropout of x; rate 0 draws nothing and returns x."""
    if rate == 0.0:
        return x
    return x * (uniform(key, *x.shape) >= rate) / (1.0 - rate)


def _wrapped(number: int) -> int:
    """`number` modulo 2**64 as int64."""
    return (number + 2**63) % 2**64 - 2**63


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical right shift of int64."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * _MIX_A
    bits = (bits ^ _shift(bits, 27)) * _MIX_B
    return bits ^ _shift(bits, 31)
