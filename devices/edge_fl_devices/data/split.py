"""Split a device's samples into train, validation and test set.

The set of a sample that is alone depends only on its values and the seed: new samples never move it from test to train, and copies of one
sample are always in the same set. Samples of one group (`edge_fl.data.grouping`) are in the same set: that of the group's first sample, by
capture time, else by a second hash. So a group stays where it is as later samples join it; without times it may move with each new sample,
with a probability of one divided by its size.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from edge_fl.data import grouping
from edge_fl.data.grouping import Groups
from edge_fl.data.samples import Array, Indices
from edge_fl.errors import DataError
from edge_fl.seeds import seed_for

Sets = tuple[Indices, Indices, Indices]
"""Positions of the train, validation and test samples in the order of reading."""


@dataclass(frozen=True)
class DeviceSplit:
    """Split by a keyed hash of each sample. The fractions hold on average; `validation_fraction` is of the samples outside the test set."""

    test_fraction: float = 0.25
    validation_fraction: float = 0.1
    seed: int = 0
    client: str = ""

    @cached_property
    def key(self) -> bytes:
        return seed_for(self.seed, "partition", client=self.client).to_bytes(8, "big")

    def sets(
        self, positions: Sequence[float], groups: Groups | None = None, times: Sequence[float] = ()
    ) -> Sets:
        """Assign samples by their positions (`position` with `key`), with their `groups` [n] (default: all alone) and capture times.

        Train and test get at least one group each; a group of more than half of the samples trains, and so does a single group: then the
        test set is empty. Raises DataError for fewer than two samples.
        """
        require_two(len(positions))
        hashes = np.asarray(positions)
        group = grouping.numbers(grouping.alone() if groups is None else groups, len(hashes))
        sizes = np.bincount(group)
        places = hashes[_first_of_each(group, hashes, times)]
        places[2 * sizes > len(hashes)] = 1.0
        last = len(places) - 1
        tests = min(max(int(np.sum(places < self.test_fraction)), 1), last)
        boundary = self.test_fraction + (1 - self.test_fraction) * self.validation_fraction
        untrained = int(np.sum(places < boundary))
        test, validation, train = np.split(
            np.argsort(places, kind="stable"), [tests, min(max(untrained, tests), last)]
        )
        train, validation, test = (np.flatnonzero(np.isin(group, part)) for part in (train, validation, test))
        return train, validation, test


SPLIT = DeviceSplit()


def require_two(count: int, sample: str = "sample") -> None:
    """Raise DataError for fewer samples than a split needs."""
    if count < 2:
        raise DataError(f"{count} usable {sample}, expected 2 or more (one to train, one to test)")


def position(sample: Array, key: bytes) -> float:
    """Hash a sample's values to a number in 0..1."""
    return hashed(np.ascontiguousarray(sample).data, key)


def hashed(content: bytes | memoryview, key: bytes) -> float:
    """Hash content and key to a number in 0..1."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, key=key).digest(), "big") / 2**64


def key(sample: Array) -> bytes:
    """Return the sha256 of a sample's shape and values."""
    header = f"{sample.dtype}{sample.shape}".encode()
    return hashlib.sha256(header + np.ascontiguousarray(sample).tobytes()).digest()


def _first_of_each(group: Groups, hashes: Array, times: Sequence[float]) -> Indices:
    """The row of the sample of each group that decides on its set: the earliest one, or by a second hash, since the smallest position would
    put every large group into the test set.
    """
    if len(group) == group.max() + 1:
        return np.arange(len(group))
    seconds = [hashed(struct.pack(">d", place), b"group") for place in hashes]
    taken = np.asarray(times) if len(times) else np.zeros(len(hashes))
    order = np.lexsort((np.array(seconds), taken, group))
    rows: Indices = order[np.searchsorted(group[order], np.arange(group.max() + 1))]
    return rows
