"""Random numbers as pure functions of a key: the same bits in a plain loop, under vmap, on a GPU and on a device.

A key is an int64 scalar tensor; numbers are hashes of key + counter by splitmix64 (Steele, Lea and Flood, OOPSLA 2014). There is no
global state. Layers of torch and of users, such as dropout, draw from torch's global generators: `seeded` sets these for a while.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

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


_turn = threading.RLock()


@contextmanager
def seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch's global generators, of the CPU and of `device`, in the block, and restore them after it.

    One thread at a time: all of a process share these generators.
    """
    generators = [torch.default_generator]
    if (place := torch.device(device)).type == "cuda":
        index = torch.cuda.current_device() if place.index is None else place.index
        generators.append(torch.cuda.default_generators[index])
    with _turn:
        before = [generator.get_state() for generator in generators]
        try:
            for generator in generators:  # torch.manual_seed takes a hundred times as long
                generator.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


LIBRARIES = {"edge_fl", "torch", "torchvision", "timm"}
"""Packages whose layers draw only if they say so; layers of others may do anything."""
_DRAWING = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def may_draw(module: nn.Module) -> bool:
    """Whether a network may draw from torch's global generators: it has dropout or the like, or a layer of the user's own."""
    return any(map(_layer_may_draw, module.modules()))


def _layer_may_draw(layer: nn.Module) -> bool:
    kind, settings = type(layer), vars(layer)
    if kind.__module__.partition(".")[0] not in LIBRARIES or layer._forward_hooks or layer._forward_pre_hooks:
        return True
    if isinstance(layer, _DRAWING) or "Stochastic" in kind.__name__:
        return bool(settings.get("p", 1.0))
    rates = (value for name, value in settings.items() if "drop" in name)
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)
