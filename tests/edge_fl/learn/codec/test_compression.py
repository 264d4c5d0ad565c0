"""Decoded tensors: close (fp16), unbiased (int8), or the largest values with the rest kept (topk)."""

import pytest
import torch
from torch import Tensor

from edge_fl.errors import ProtocolError
from edge_fl.learn.codec.compression import AT, CODECS, SCALE
from edge_fl.learn.random import fold, key_of

KEY = key_of(7)


def change(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def through(kind: str, x: Tensor, key: Tensor = KEY, keep: float = 0.1) -> Tensor:
    codec = CODECS[kind]
    return codec.decode(codec.encode(x, keep, key), x.shape)


def test_fp16_is_the_nearest_number_and_never_infinite() -> None:
    x = change(5, 3)
    assert torch.equal(through("fp16", x), x.half().float())
    assert through("fp16", torch.tensor([1e9, -1e9])).tolist() == [65504, -65504]


def test_int8_is_at_most_one_level_off_and_right_on_average() -> None:
    x = change(40)
    level = x.abs().max() / 127
    each = torch.stack([through("int8", x, fold(KEY, n)) for n in range(400)])
    assert (each - x).abs().max() <= level * 1.001
    assert (each.mean(0) - x).abs().max() < level * 0.1  # four standard errors of a mean of 400
    assert torch.equal(through("int8", torch.zeros(4)), torch.zeros(4))
    assert through("int8", x).abs().max() == pytest.approx(x.abs().max())


def test_topk_sends_the_largest_values_to_the_bit() -> None:
    x = change(6, 10)
    found = through("topk", x)
    assert (found != 0).sum() == 6
    assert torch.equal(found[found != 0], x[found != 0])
    assert x[found != 0].abs().min() >= x[found == 0].abs().max()
    assert torch.equal(through("topk", x, keep=1.0), x)
    assert (through("topk", x, keep=1e-9) != 0).sum() == 1


@pytest.mark.parametrize("at", [[0, 0], [1, 0], [-1, 2], [0, 9]])
def test_positions_that_are_none_are_refused(at: list[int]) -> None:
    coded = {"": torch.ones(2), AT: torch.tensor(at, dtype=torch.int32)}
    with pytest.raises(ProtocolError, match="ascending ones below 9"):
        CODECS["topk"].decode(coded, torch.Size([3, 3]))


def test_each_kind_has_its_compression_ratio() -> None:
    x = change(64, 32)
    size = {
        kind: sum(t.numel() * t.element_size() for t in codec.encode(x, 0.1, KEY).values())
        for kind, codec in CODECS.items()
    }
    assert size == {"fp16": 4096, "int8": 2048 + 4, "topk": 205 * 8}
    assert CODECS["int8"].encode(x, 0.1, KEY)[SCALE].shape == ()
