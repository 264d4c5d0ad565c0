"""Batches are determined by (run, stage, round, client); short last batches do not reach BatchNorm."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edge_fl.learn.batches import Batches, cut, in_batches
from edge_fl.learn.pictures import pixels
from tests.edge_fl.methods import toy


def data(number: int, **settings: object) -> Batches:
    settings = {"batch_size": 8, "run": 1, "round": 2, "client": "c0", **settings}
    return Batches.of(torch.arange(number)[:, None].float(), torch.arange(number) % 3, classes=3, **settings)


def rows(batches: Batches, stage: str = "train", epochs: int = 1, norm: bool = False) -> list[list[int]]:
    return [batch.x[:, 0].int().tolist() for batch in batches.batches(stage, epochs, norm=norm)]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 3))
def test_every_epoch_has_each_sample_once(number: int, size: int, epochs: int) -> None:
    found = [row for batch in rows(data(number, batch_size=size), epochs=epochs) for row in batch]
    assert len(found) == number * epochs
    for epoch in range(epochs):
        assert sorted(found[epoch * number : (epoch + 1) * number]) == list(range(number))


def test_labels_stay_with_their_samples() -> None:
    for batch in data(19).batches("train", 2):
        assert batch.y.equal(batch.x[:, 0].long() % 3)


@pytest.mark.parametrize(
    ("number", "norm", "sizes"),
    [
        (18, False, [8, 8, 2]),
        (18, True, [8, 10]),  # a tail of two joins the batch before it
        (19, True, [8, 11]),
        (20, True, [8, 8, 4]),  # four are enough
        (3, True, [3]),  # nothing to join
        (1, True, []),  # BatchNorm cannot train on one sample
        (1, False, [1]),
    ],
)
def test_a_short_tail_is_merged_where_batchnorm_trains(number: int, norm: bool, sizes: list[int]) -> None:
    assert [len(batch) for batch in rows(data(number), norm=norm)] == sizes


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 6))
def test_cut_loses_nothing_and_leaves_no_short_tail(number: int, size: int, shortest: int) -> None:
    parts = cut(np.arange(number), size, shortest)
    assert np.concatenate(parts).tolist() == list(range(number))
    assert all(len(part) == size for part in parts[:-1])
    assert len(parts) == 1 or len(parts[-1]) >= min(shortest, size)


def test_order_and_noise_depend_on_run_stage_round_and_client_and_on_nothing_else() -> None:
    base = data(30)
    assert rows(base) == rows(data(30))
    others = [replace(base, run=9), replace(base, round=9), replace(base, client="c9")]
    assert all(rows(base) != rows(other) for other in others)
    assert rows(base, "s1") != rows(base, "s2")

    def keys(batches: Batches, stage: str = "train") -> list[int]:
        return [int(batch.key) for batch in batches.batches(stage, 2)]

    assert keys(base) == keys(data(30))
    assert len(set(keys(base))) == len(keys(base)) == 8
    assert all(not set(keys(base)) & set(keys(other)) for other in others)
    assert not set(keys(base, "s1")) & set(keys(base, "s2"))


def test_step_numbers_continue_over_epochs() -> None:
    one, two = rows(data(30), epochs=1), rows(data(30), epochs=2)
    assert two[:4] == one
    assert two[4:] != one


def test_pixels_are_scaled_once_and_features_not_at_all() -> None:
    images = torch.tensor([[[[0, 51, 255]]]], dtype=torch.uint8)
    assert pixels(images).flatten().tolist() == pytest.approx([0, 0.2, 1])
    assert images.dtype == torch.uint8
    features = torch.tensor([[0.3]])
    assert pixels(features) is features


def test_features_are_those_of_the_frozen_part_in_order() -> None:
    net, batches = toy.net(), toy.batches()
    params = net.extractor.init()
    z = batches.features(net.extractor, params)
    assert z.x.shape == (len(batches), 12)
    assert z.x.allclose(net.extractor.frozen(params, pixels(batches.x)), atol=1e-6)
    assert z.y is batches.y
    assert not z.x.requires_grad
    assert (z.run, z.round, z.client, z.batch_size) == (
        batches.run,
        batches.round,
        batches.client,
        batches.batch_size,
    )


def test_evaluation_in_batches_is_the_whole_at_once() -> None:
    x = torch.arange(10.0)[:, None]
    assert in_batches(lambda part: part * 2, x, size=3).equal(x * 2)


def test_counts_are_of_every_class_absent_ones_too() -> None:
    found = Batches.of(np.zeros((4, 1), np.float32), np.array([2, 0, 2, 2]), classes=4)
    assert found.counts.tolist() == [1, 0, 3, 0]


def test_batches_shrink_where_a_stage_needs_more_of_them() -> None:
    def sizes(samples: int, batches: int, epochs: int = 1, *, norm: bool = False) -> list[int]:
        data = Batches.of(torch.zeros(samples, 1), torch.zeros(samples), classes=1, batch_size=32)
        cut = data.in_at_least(batches, epochs, norm=norm)
        return [len(batch.y) for batch in cut.batches("train", epochs, norm=norm)]

    assert sizes(40, 2) == [32, 8]
    assert sizes(30, 2) == [15, 15]
    assert sizes(30, 2, epochs=2) == [30, 30]
    assert sizes(9, 2, norm=True) == [4, 5]
    assert sizes(6, 2, norm=True) == [6]
    assert sizes(1, 2) == [1]


def test_values_computed_once_are_those_of_each_batch() -> None:
    drawn = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (11, 1, 4, 4), generator=drawn, dtype=torch.uint8)
    data = Batches.of(x, torch.zeros(11, dtype=torch.int64), classes=2, batch_size=4)
    calls: list[int] = []

    def brightness(images: torch.Tensor) -> torch.Tensor:
        calls.append(len(images))
        return images.flatten(1).sum(1)

    known = data.once(brightness)
    for batch in data.batches("s", 2):
        assert torch.allclose(known(batch), batch.x.flatten(1).sum(1))
    assert calls == [11], "once for all epochs"
    augmented = replace(data, augment="crop")
    changed = augmented.once(brightness)
    for batch in augmented.batches("s", 1):
        assert torch.equal(changed(batch), batch.x.flatten(1).sum(1))
    assert calls == [11, 4, 4, 3]
