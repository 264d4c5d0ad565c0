"""Data of many clients in one computation: aligned batches, and features in pieces."""

import numpy as np
import pytest
import torch
from torch import Tensor

from edge_fl.learn import stacked
from edge_fl.learn.batches import EVALUATION_BATCH, Batches
from edge_fl.learn.stacked import Stacked, stack

SIZES = (2 * EVALUATION_BATCH + 3, 5)


def members() -> list[Batches]:
    drawn = torch.Generator().manual_seed(0)
    return [
        Batches.of(
            torch.randint(0, 256, (size, 1, 4, 4), generator=drawn, dtype=torch.uint8),
            torch.zeros(size, dtype=torch.int64),
            classes=2,
            client=str(place),
        )
        for place, size in enumerate(SIZES)
    ]


@pytest.mark.parametrize(("limit", "pieces"), [(stacked.MAPPED_BYTES, 1), (1, 3)])
def test_features_of_small_images_are_computed_in_one_piece(
    monkeypatch: pytest.MonkeyPatch, limit: int, pieces: int
) -> None:
    monkeypatch.setattr(stacked, "MAPPED_BYTES", limit)
    clients, seen = members(), list[int]()

    def halved(x: Tensor) -> Tensor:
        seen.append(len(x))
        return 0.5 * x.flatten(1)

    def features(place: Tensor, x: Tensor, y: Tensor, real: Tensor) -> Tensor:
        return Stacked(x, y, 2, members=tuple(clients), place=place, real=real).mapped(halved).x

    found = torch.vmap(features)(torch.arange(len(clients)), *stack(clients))
    assert len(seen) == pieces and sum(seen) == SIZES[0]
    for client, size, z in zip(clients, SIZES, found, strict=True):
        assert torch.equal(z[:size], client.mapped(lambda x: 0.5 * x.flatten(1)).x)


def test_a_step_is_as_wide_as_its_largest_batch() -> None:
    plan = stacked._plan([[np.array([4, 2]), np.array([0, 1, 3])], [np.array([1, 0])], []])
    assert plan.widths == [2, 3]
    assert plan.index.tolist() == [[4, 2, 0, 1, 3], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert plan.mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert plan.active.tolist() == [[True, True], [True, False], [False, False]]
    assert plan.full == [False, False] and plan.all_on == [False, False]
