"""Split a device's images into train, validation and test set.

The set of an image depends only on its pixels and the seed: new images never move an image from test to train, and copies of one
image are always in the same set.
"""

from __future__ import annotations

import hashlib

import numpy as np

from edge_fl.data.samples import Array, ClientData, Samples
from edge_fl.errors import DataError
from edge_fl.seeds import seed_for


def split(
    samples: Samples, test_fraction: float, validation_fraction: float, *, seed: int = 0, client: str = ""
) -> ClientData:
    """Split by a keyed hash of each image; train and test get at least one image each.

    The fractions hold on average; `validation_fraction` is of the images outside the test set. Raises DataError for fewer than two samples.
    """
    require_two(len(samples))
    key = seed_for(seed, "partition", client=client).to_bytes(8, "big")
    positions = np.array([position(image, key) for image in samples.x])
    last = len(samples) - 1
    tests = min(max(int(np.sum(positions < test_fraction)), 1), last)
    untrained = int(np.sum(positions < test_fraction + (1 - test_fraction) * validation_fraction))
    test, validation, train = np.split(
        np.argsort(positions, kind="stable"), [tests, min(max(untrained, tests), last)]
    )
    return ClientData(*(samples.take(np.sort(part)) for part in (train, validation, test)))


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
