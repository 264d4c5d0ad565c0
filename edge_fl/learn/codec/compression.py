"""Updates made smaller before they travel: a tensor's change against what was received, coded, and opened again by the server.

- `fp16` halves it, to the nearest number.
- `int8` quarters it: whole multiples of one scale per tensor, rounded at random, up as often as its share of the way up, so that a mean
  over clients is not biased (QSGD: Alistarh et al., NeurIPS 2017; in federated learning FedPAQ: Reisizadeh et al., AISTATS 2020).
- `topk` sends the share `keep` of each tensor's values that are largest, and where they stand. The rest stays with the client and is
  added to its next change (error feedback: Stich et al., NeurIPS 2018; Karimireddy et al., ICML 2019; by tensor as in Deep Gradient
  Compression: Lin et al., ICLR 2018), so that all that is sent and what is left over sum to all that was learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from edge_fl.errors import ProtocolError
from edge_fl.learn.random import uniform

SCALE, AT = "|scale", "|at"
LARGEST_FP16 = torch.finfo(torch.float16).max
LEVELS = 127

Coded = dict[str, Tensor]
"""What stands for one float32 tensor on the way: values under "", what else is needed to read them under SCALE or AT."""


@dataclass(frozen=True)
class Codec:
    """`encode(change, keep, key)` draws from `key`; `decode(coded, shape)` gives float32. `feedback`: what it loses is kept for later."""

    encode: Callable[[Tensor, float, Tensor], Coded]
    decode: Callable[[Coded, torch.Size], Tensor]
    feedback: bool = False


def _to_half(change: Tensor, keep: float, key: Tensor) -> Coded:
    return {"": change.clamp(-LARGEST_FP16, LARGEST_FP16).half()}


def _from_half(coded: Coded, shape: torch.Size) -> Tensor:
    return coded[""].float()


def _to_levels(change: Tensor, keep: float, key: Tensor) -> Coded:
    scale = change.abs().max() / LEVELS
    levels = change / torch.where(scale > 0, scale, 1.0)
    rounded = torch.floor(levels + uniform(key.to(change.device), *change.shape))
    return {"": rounded.clamp(-LEVELS, LEVELS).to(torch.int8), SCALE: scale}


def _from_levels(coded: Coded, shape: torch.Size) -> Tensor:
    return coded[""].float() * coded[SCALE]


def _to_largest(change: Tensor, keep: float, key: Tensor) -> Coded:
    flat = change.flatten()
    at = flat.abs().topk(max(round(keep * len(flat)), 1)).indices.sort().values
    return {"": flat[at], AT: at.int()}


def _from_largest(coded: Coded, shape: torch.Size) -> Tensor:
    at = coded[AT].long()
    if not bool((at.diff() > 0).all() and (at >= 0).all() and (at < shape.numel()).all()):
        raise ProtocolError(f"topk: positions of values, expected ascending ones below {shape.numel()}")
    return coded[""].new_zeros(shape.numel()).index_put((at,), coded[""]).reshape(shape)


CODECS: Mapping[str, Codec] = {
    "fp16": Codec(_to_half, _from_half),
    "int8": Codec(_to_levels, _from_levels),
    "topk": Codec(_to_largest, _from_largest, feedback=True),
}
"""By the name that a recipe has for it; "none" is none of them."""
