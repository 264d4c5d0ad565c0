"""Every labelled picture of a device is in at most one sum per extractor, and in none if the owner says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_fl.errors import ArtefactError, StatisticsError
from edge_fl.heads.statistics import class_statistics
from edge_fl.heads.statistics.class_statistics import MOST_PER_CLASS
from edge_fl_devices.workers.statistics import NEXT, StatisticsOffers

CLASSES, DIM = 3, 20
LENGTH = class_statistics.shape_of(CLASSES, DIM).length
ONE, OTHER = "1" * 64, "2" * 64


def pictures(n: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The first n of always the same pictures."""
    return np.random.default_rng(0).normal(size=(500, DIM)).astype(np.float32)[:n], np.arange(500)[
        :n
    ] % CLASSES


def prepared(folder: Path, n: int, release: int = 1, extractor: str = ONE) -> StatisticsOffers:
    """A device's offers after a fit on n pictures, in a new process."""
    offers = StatisticsOffers(folder)
    offers.prepare(release, extractor, *pictures(n), CLASSES)
    return offers


def counts(offers: StatisticsOffers, release: int = 1) -> list[float] | None:
    """Pictures of each class in the vector given out; None without a vector."""
    vector = offers.give(release, LENGTH)
    return None if vector is None else vector[:CLASSES].tolist()


def test_a_device_offers_once_and_again_with_the_new_pictures_when_its_labels_have_grown(
    tmp_path: Path,
) -> None:
    first = prepared(tmp_path, 12)
    assert counts(first) == [4, 4, 4]
    first.add(1)
    assert counts(first) is None
    for n in (12, 17):
        assert counts(prepared(tmp_path, n)) is None
    grown = prepared(tmp_path, 18, release=2)
    assert counts(grown) is None and counts(grown, 2) == [2, 2, 2]


def test_a_vector_that_reached_no_sum_is_given_again_also_after_a_restart(tmp_path: Path) -> None:
    before = prepared(tmp_path, 12).give(1, LENGTH)
    again = StatisticsOffers(tmp_path).give(1, LENGTH)
    assert before is not None and again is not None and np.array_equal(before, again)


def test_all_sums_together_hold_every_picture_once_and_no_more_than_the_limit_per_class(
    tmp_path: Path,
) -> None:
    total, n = np.zeros(LENGTH), 9
    while n < 500:
        offers = prepared(tmp_path, n)
        if (vector := offers.give(1, LENGTH)) is not None:
            total += vector
            offers.add(1)
        n *= 2
    found = class_statistics.from_flat(total, class_statistics.shape_of(CLASSES, DIM))
    assert found.counts.tolist() == [MOST_PER_CLASS] * CLASSES


def test_equal_pictures_and_those_with_another_label_now_count_once(tmp_path: Path) -> None:
    z, y = pictures(12)
    offers = StatisticsOffers(tmp_path)
    offers.prepare(1, ONE, np.concatenate([z, z]), np.concatenate([y, y]), CLASSES)
    assert counts(offers) == [4, 4, 4]
    offers.add(1)
    more, labels = pictures(36)
    labels = labels.copy()
    labels[:12] = 0
    offers.prepare(1, ONE, more, labels, CLASSES)
    assert counts(offers) == [8, 8, 8]


def test_another_extractor_starts_anew(tmp_path: Path) -> None:
    first = prepared(tmp_path, 12)
    assert counts(first) == [4, 4, 4]
    first.add(1)
    assert counts(prepared(tmp_path, 12, release=2, extractor=OTHER), 2) == [4, 4, 4]


def test_a_power_cut_between_the_two_files_does_not_give_a_picture_twice(tmp_path: Path) -> None:
    first = prepared(tmp_path, 12)
    assert counts(first) == [4, 4, 4]
    kept = (tmp_path / "statistics" / NEXT).read_bytes()
    first.add(1)
    (tmp_path / "statistics" / NEXT).write_bytes(kept)
    assert counts(StatisticsOffers(tmp_path)) is None


def test_one_class_alone_offers_nothing(tmp_path: Path) -> None:
    offers = StatisticsOffers(tmp_path)
    z, y = pictures(12)
    offers.prepare(1, ONE, z, y, CLASSES)
    offers.prepare(1, ONE, z[y == 1], y[y == 1], CLASSES)
    assert counts(offers) is None


def test_a_sum_of_another_length_is_an_error_and_a_damaged_file_gives_nothing(tmp_path: Path) -> None:
    offers = prepared(tmp_path, 12)
    with pytest.raises(
        StatisticsError, match=f"a sum of 7 numbers, this device has {LENGTH}; nothing was sent"
    ):
        offers.give(1, 7)
    (tmp_path / "statistics" / NEXT).write_bytes(b"damaged")
    assert counts(offers) is None


def test_a_full_disk_is_an_error_by_name(tmp_path: Path) -> None:
    (tmp_path / "statistics").write_text("in the way")
    with pytest.raises(ArtefactError, match="what was there stays"):
        prepared(tmp_path, 12)


def test_only_its_user_can_read_the_files(tmp_path: Path) -> None:
    first = prepared(tmp_path, 12)
    assert counts(first)
    modes = {(tmp_path / "statistics" / NEXT).stat().st_mode & 0o777}
    first.add(1)
    assert modes | {path.stat().st_mode & 0o777 for path in (tmp_path / "statistics").iterdir()} == {0o600}
