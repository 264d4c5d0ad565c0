"""A device's images as train, validation and test set.

Which set an image belongs to follows from its pixels and the seed alone: when images are added, none that was tested on is ever trained
on, and copies of one image stay together.
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
    """Two or more samples as train, validation and test set, by a keyed hash of each image; train and test get one each at least.

    The shares hold on average; `validation_fraction` is of what is not tested on. Raises DataError for fewer than two samples.
    """
    if len(samples) < 2:
        raise DataError(f"{len(samples)} usable image, expected 2 or more (one to train, one to test)")
    key = seed_for(seed, "partition", client=client).to_bytes(8, "big")
    place = np.array([position(image, key) for image in samples.x])
    last = len(samples) - 1
    tests = min(max(int(np.sum(place < test_fraction)), 1), last)
    untrained = int(np.sum(place < test_fraction + (1 - test_fraction) * validation_fraction))
    test, validation, train = np.split(
        np.argsort(place, kind="stable"), [tests, min(max(untrained, tests), last)]
    )
    return ClientData(*(samples.take(np.sort(part)) for part in (train, validation, test)))


def position(image: Array, key: bytes) -> float:
    """Where an image falls between 0 and 1, from its pixels."""
    return hashed(np.ascontiguousarray(image).data, key)


def hashed(content: bytes | memoryview, key: bytes) -> float:
    """A number in 0..1 that depends on nothing but content and key."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8, key=key).digest(), "big") / 2**64
