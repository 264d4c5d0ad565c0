"""Compression of updates: encode a tensor's change against the received value, and decode it on the server.

- `fp16`: half the size, rounded to nearest.
- `int8`: a quarter of the size; multiples of one scale per tensor with stochastic rounding, so that a mean over clients is unbiased
  (QSGD: Alistarh et al., NeurIPS 2017; FedPAQ: Reisizadeh et al., AISTATS 2020).
- `topk`: the share `keep` of each tensor's values with the largest magnitude, and their positions. The client adds the rest to its next
  change (error feedback: Stich et al., NeurIPS 2018; Karimireddy et al., ICML 2019; per tensor as in Deep Gradient Compression: Lin et al.,
  ICLR 2018).
"""

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
"""One encoded float32 tensor: values under "", the scale under SCALE, positions under AT."""


@dataclass(frozen=True)
class Codec:
    """`encode(change, keep, key)` draws from `key`; `decode(coded, shape)` returns float32. `feedback`: the client keeps the residual."""

    encode: Callable[[Tensor, float, Tensor], Coded]
    decode: Callable[[Coded, torch.Size], Tensor]
    feedback: bool = False


def _to_levels(change: Tensor, keep: float, key: Tensor) -> Coded:
    scale = change.abs().max() / LEVELS
    levels = change / torch.where(scale > 0, scale, 1.0)
    rounded = torch.floor(levels + uniform(key.to(change.device), *change.shape))
    return {"": rounded.clamp(-LEVELS, LEVELS).to(torch.int8), SCALE: scale}


def _to_largest(change: Tensor, keep: float, key: Tensor) -> Coded:
    flat = change.flatten()
    at = flat.abs().topk(max(round(keep * len(flat)), 1)).indices.sort().values
    return {"": flat[at], AT: at.int()}


def _from_largest(coded: Coded, shape: torch.Size) -> Tensor:
    at = coded[AT].long()
    if not bool((at.diff() > 0).all() and (at >= 0).all() and (at < shape.numel()).all()):
        raise ProtocolError(f"topk: invalid positions, expected ascending ones below {shape.numel()}")
    return coded[""].new_zeros(shape.numel()).index_put((at,), coded[""]).reshape(shape)


CODECS: Mapping[str, Codec] = {
    "fp16": Codec(
        lambda change, keep, key: {"": change.clamp(-LARGEST_FP16, LARGEST_FP16).half()},
        lambda coded, shape: coded[""].float(),
    ),
    "int8": Codec(_to_levels, lambda coded, shape: coded[""].float() * coded[SCALE]),
    "topk": Codec(_to_largest, _from_largest, feedback=True),
}
"""By their names in recipes; "none" has no codec."""
