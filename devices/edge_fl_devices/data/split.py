"""Split a device's images into train, validation and test set.

The set of an image depends only on its pixels and the seed: new images never move an image from test to train, and copies of one
image are always in the same set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from edge_fl.data.samples import Array, Indices
from edge_fl.errors import DataError
from edge_fl.seeds import seed_for

Sets = tuple[Indices, Indices, Indices]
"""Positions of the train, validation and test images in the order of reading."""


@dataclass(frozen=True)
class Split:
    """Split by a keyed hash of each image. The fractions hold on average; `validation_fraction` is of the images outside the test set."""

    test_fraction: float = 0.25
    validation_fraction: float = 0.1
    seed: int = 0
    client: str = ""

    @cached_property
    def key(self) -> bytes:
        return seed_for(self.seed, "partition", client=self.client).to_bytes(8, "big")

    def sets(self, positions: Sequence[float]) -> Sets:
        """Assign images by their positions (`position` with `key`); train and test get at least one each.

        Raises DataError for fewer than two images.
        """
        require_two(len(positions))
        hashes = np.asarray(positions)
        last = len(hashes) - 1
        tests = min(max(int(np.sum(hashes < self.test_fraction)), 1), last)
        boundary = self.test_fraction + (1 - self.test_fraction) * self.validation_fraction
        untrained = int(np.sum(hashes < boundary))
        test, validation, train = np.split(
            np.argsort(hashes, kind="stable"), [tests, min(max(untrained, tests), last)]
        )
        return np.sort(train), np.sort(validation), np.sort(test)


SPLIT = Split()


def require_two(samples: int) -> None:
    """Raise DataError for fewer samples than a split needs."""
    if samples < 2:
        raise DataError(f"{samples} usable image, expected 2 or more (one to train, one to test)")


def position(image: Array, key: bytes) -> float:
    """Hash an image's pixels to a number in 0..1."""
    return hashed(np.ascontiguousarray(image).data, key)


def hashed(content: bytes | memoryview, key: bytes) -> float:
    """Hash content and key to a number in 0..1."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, key=key).digest(), "big") / 2**64


def key(image: Array) -> bytes:
    """Return the sha256 of an image's shape and pixels."""
    header = f"{image.dtype}{image.shape}".encode()
    return hashlib.sha256(header + np.ascontiguousarray(image).tobytes()).digest()
