"""A device's images are split by their pixels and a seed: none that was tested on is ever trained on."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_fl.data import datasets
from edge_fl.data.samples import ClientData, Samples
from edge_fl_devices.data.load import SampleStream, collect
from edge_fl_devices.data.spec import SourceData
from edge_fl_devices.data.split import DeviceSplit, position

DIGITS = datasets.load("digits", Path("nowhere"))


def split(samples: Samples, *, seed: int = 0) -> ClientData:
    """In batches of seven."""
    batches = (samples.take(np.arange(i, min(i + 7, len(samples)))) for i in range(0, len(samples), 7))
    return collect(
        SampleStream(
            SourceData(tuple(map(str, range(60))), lambda wants: batches), DeviceSplit(0.25, 0.1, seed)
        )
    )


@given(st.integers(2, 60), st.integers(0, 2**31))
def test_every_sample_is_in_one_set_and_none_that_was_tested_on_is_trained_on_when_more_come(
    n: int, seed: int
) -> None:
    x, y = DIGITS.samples.x[:60], np.arange(60)
    few = split(Samples(x[:n], y[:n]), seed=seed)
    more = split(Samples(x, y), seed=seed)
    parts = [set(part.y.tolist()) for part in (few.train, few.validation, few.test)]
    assert sorted(i for part in parts for i in part) == list(range(n))
    assert parts[0]
    assert parts[2]
    if min(len(parts[0]), len(parts[2])) > 1:  # a set of one may have been given what it must have
        assert not parts[2] & set(more.train.y.tolist())
        assert not parts[0] & set(more.test.y.tolist())


def test_shares_hold_on_average_and_the_seed_decides() -> None:
    first = split(DIGITS.samples, seed=0)
    assert len(first.test) == pytest.approx(1797 * 0.25, rel=0.1)
    assert len(first.validation) == pytest.approx(1797 * 0.075, rel=0.2)
    again, other = (split(DIGITS.samples, seed=seed) for seed in (0, 1))
    assert again.fingerprint() == first.fingerprint() != other.fingerprint()


def test_copies_of_an_image_stay_together() -> None:
    twice = Samples(np.repeat(DIGITS.samples.x[:50], 2, axis=0), np.repeat(np.arange(50), 2))
    found = split(twice)
    assert not set(found.train.y) & set(found.test.y)


GROUPS = st.lists(st.integers(0, 9), min_size=2, max_size=40)


def placed(members: list[int], times: list[float] | None = None, seed: int = 0) -> list[set[int]]:
    """The images of each of the three sets, by number; the image with a number has the same pixels in every call."""
    positions = [
        position(np.full((1, 1, 1), number, np.uint8), DeviceSplit(seed=seed).key)
        for number in range(len(members))
    ]
    return [
        set(part.tolist())
        for part in DeviceSplit(0.25, 0.1, seed).sets(positions, np.array(members), times or ())
    ]


@given(GROUPS, st.integers(0, 99))
def test_no_set_shares_a_group_with_another_and_there_is_always_one_to_train(
    members: list[int], seed: int
) -> None:
    parts = placed(members, seed=seed)
    assert sorted(row for part in parts for row in part) == list(range(len(members)))
    of_groups = [{members[row] for row in part} for part in parts]
    assert sum(map(len, of_groups)) == len(set(members))
    assert parts[0] and bool(parts[2]) == (len(set(members)) > 1)
    assert not any(2 * members.count(group) > len(members) for group in of_groups[1] | of_groups[2])


@given(GROUPS)
def test_images_that_are_alone_are_placed_by_their_pixels_next_to_groups(members: list[int]) -> None:
    """A group does not change where other images are, except the few that a set must have."""
    rest = [100 + row for row in range(60)]
    before, after = placed([*range(200, 200 + len(members)), *rest]), placed([*members, *rest])
    moved = [row for row in range(len(members), len(members) + 60) if (row in before[2]) != (row in after[2])]
    assert not moved


@given(GROUPS, st.integers(1, 20))
def test_a_group_stays_in_its_set_while_later_images_join(members: list[int], more: int) -> None:
    rest = [100 + row for row in range(100)]
    given = [*members, *rest]
    before = placed(given, [float(row) for row in range(len(given))])
    grown = [*given, *[members[0]] * more]
    after = placed(grown, [float(row) for row in range(len(grown))])
    assert all(old <= new for old, new in zip(before, after, strict=True))


def test_large_groups_are_in_the_test_set_as_often_as_single_images() -> None:
    tested = [
        bool(0 in placed([0] * 20 + [1 + row for row in range(60)], seed=seed)[2]) for seed in range(400)
    ]
    assert np.mean(tested) == pytest.approx(0.25, abs=0.08)
