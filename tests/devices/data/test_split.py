"""A device's images are split by their pixels and a seed: none that was tested on is ever trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_fl.data import datasets
from edge_fl.data.samples import ClientData, Samples
from edge_fl_devices.data.spec import SourceData
from edge_fl_devices.data.split import Split
from edge_fl_devices.data.stream import ImageStream, collect

DIGITS = datasets.load("digits", Path("nowhere"))


def split(samples: Samples, *, seed: int = 0) -> ClientData:
    """In batches of seven."""
    batches = (samples.take(np.arange(i, min(i + 7, len(samples)))) for i in range(0, len(samples), 7))
    return collect(ImageStream(SourceData(tuple(map(str, range(60))), batches), Split(0.25, 0.1, seed)))


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
