"""Ranks by energy (METHODS.md F10), and factors that never cost more than what they replace."""

from __future__ import annotations

import pytest
import torch

from edge_fl.learn import lowrank, tree


def low(rows: int, columns: int, rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(rows, rank, generator=draw) @ torch.randn(rank, columns, generator=draw)


@pytest.mark.parametrize(("energy", "rank"), [(0.5, 1), (0.9, 2), (0.95, 3), (1.0, 3)])
def test_rank_has_the_numbers_of_section_7(energy: float, rank: int) -> None:
    assert lowrank.rank(torch.tensor([3.0, 2.0, 1.0]), energy) == rank


def test_a_matrix_of_zeros_has_rank_one() -> None:
    assert lowrank.rank(torch.zeros(4), 0.95) == 1


def test_all_the_energy_is_lossless() -> None:
    params = {
        "conv.weight": low(8, 36, 3).reshape(8, 4, 3, 3),
        "linear.weight": torch.randn(6, 7),
        "bias": torch.ones(5),
    }
    back = lowrank.multiplied(lowrank.factorised(params, 1.0), params)
    assert back.keys() == params.keys()
    assert all(torch.allclose(back[name], params[name], atol=1e-5) for name in params)


def test_low_rank_travels_as_two_thin_factors() -> None:
    thin = lowrank.factorised({"conv.weight": low(8, 36, 2).reshape(8, 4, 3, 3)}, 0.999)
    assert {name: tuple(t.shape) for name, t in thin.items()} == {
        "conv.weight~left": (8, 2),
        "conv.weight~right": (2, 36),
    }


def test_factors_that_would_be_larger_are_not_sent() -> None:
    params = {"weight": torch.eye(6), "bias": torch.ones(6), "scale": torch.tensor(2.0)}
    thin = lowrank.factorised(params, 0.95)
    assert tree.same(thin, params)
    assert tree.count(lowrank.factorised({"weight": low(6, 6, 1)}, 0.95)) == 12


def test_less_energy_is_a_worse_copy_by_just_that_much() -> None:
    matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    back = lowrank.multiplied(lowrank.factorised({"weight": matrix}, 0.9), {"weight": matrix})["weight"]
    assert torch.allclose(back.diagonal()[:3], torch.tensor([3.0, 2.0, 0.0]), atol=1e-6)
