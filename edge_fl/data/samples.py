"""Types for labelled images: samples, one client's three sets, and a whole dataset.

Pixels are uint8 [N, C, H, W], class ids int64 [N]. Values are validated once, at construction; `Samples.of` converts other arrays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_fl.errors import DataError, shortened
from edge_fl.inputs import InputSpec

Array = NDArray[Any]
Images = NDArray[np.uint8]
Labels = NDArray[np.int64]
Indices = NDArray[np.int64]
_BLOCK = 4096  # images per step in a pass over a dataset
MAX_CLASSES = 10_000
_CHANNELS = (1, 3)


@dataclass(frozen=True, eq=False)
class Samples:
    """Images x uint8 [N, C, H, W] with class ids y int64 [N]; N may be 0. Raises DataError for anything else."""

    x: Images
    y: Labels

    def __post_init__(self) -> None:
        if self.x.dtype != np.uint8 or self.x.ndim != 4:
            raise DataError(f"samples: x is {self.x.dtype} {list(self.x.shape)}, expected uint8 [N, C, H, W]")
        if self.y.dtype != np.int64 or self.y.shape != self.x.shape[:1]:
            raise DataError(
                f"samples: y is {self.y.dtype} {list(self.y.shape)}, expected int64 [{len(self.x)}]"
            )
        if len(self) and self.y.min() < 0:
            raise DataError(f"samples: label {self.y.min()} at index {self.y.argmin()}, expected 0 or more")

    @classmethod
    def of(cls, x: Array, y: Array, classes: Sequence[str], where: str) -> Samples:
        """Samples from arrays as files have them (`as_pixels`). Raises DataError whose message starts with `where` (a file, a function)."""
        images = as_pixels(x, where)
        if len(y) != len(images):
            raise DataError(
                f"{where}: {len(images)} images but {len(y)} labels, expected one label per image"
            )
        return cls(images, as_labels(y, classes, where))

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""
        _, channels, height, width = self.x.shape
        return channels, height, width

    def take(self, indices: Indices) -> Samples:
        """The samples at `indices`, copied in that order."""
        return Samples(self.x[indices], self.y[indices])

    def counts(self, classes: int) -> Labels:
        """Samples per class, int64 [classes]."""
        return np.bincount(self.y, minlength=classes).astype(np.int64)

    def fingerprint(self) -> str:
        """sha256 over shape, pixels and labels; the same on every machine."""
        digest = hashlib.sha256(f"{self.x.shape}".encode())
        digest.update(np.ascontiguousarray(self.x).data)
        digest.update(np.ascontiguousarray(self.y, dtype="<i8").data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class ClientData:
    """Data of one client: `train` for training, `validation` for choices, `test` for reported metrics."""

    train: Samples
    validation: Samples
    test: Samples

    def fingerprint(self) -> str:
        """sha256 over the three sets."""
        parts = (self.train, self.validation, self.test)
        return hashlib.sha256("".join(part.fingerprint() for part in parts).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Dataset:
    """All samples of a dataset, with original train and test sets merged, before it is split over clients.

    `classes` names the class ids. `original_test` bool [N] marks the original test images. With several domains, `domains` int64 [N] gives
    the domain of each sample and `domain_names` their names; otherwise both are empty.
    """

    name: str
    samples: Samples
    classes: tuple[str, ...]
    original_test: NDArray[np.bool_] | None = None
    domains: Indices | None = None
    domain_names: tuple[str, ...] = field(default=())

    @cached_property
    def input(self) -> InputSpec:
        """Input of an extractor for these images, with mean and std of 0..1 pixels per channel (of the original training images)."""
        channels, height, width = self.samples.shape
        mean, std = self._moments
        return InputSpec((channels, height, width), mean, std)

    def fingerprint(self) -> str:
        """sha256 over the samples, the original test set and the domains."""
        marks = [mark.tobytes() for mark in (self.original_test, self.domains) if mark is not None]
        return hashlib.sha256(self.samples.fingerprint().encode() + b"".join(marks)).hexdigest()

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of the 0..1 pixels per channel."""
        return self._moments[0]

    @property
    def std(self) -> tuple[float, ...]:
        """Standard deviation of the 0..1 pixels per channel."""
        return self._moments[1]

    @cached_property
    def _moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Exact integer sums, block by block, to avoid a float copy of the dataset."""
        held_out = self.original_test
        rows = (
            np.flatnonzero(~held_out)
            if held_out is not None and not held_out.all()
            else np.arange(len(self.samples))
        )
        channels, height, width = self.samples.shape
        total, squares = np.zeros(channels, np.int64), np.zeros(channels, np.int64)
        for start in range(0, len(rows), _BLOCK):
            block = self.samples.x[rows[start : start + _BLOCK]].astype(np.int32)
            total += block.sum(axis=(0, 2, 3), dtype=np.int64)
            squares += np.square(block).sum(axis=(0, 2, 3), dtype=np.int64)
        pixels = len(rows) * height * width
        mean = total / pixels
        # a constant channel is divided by one grey level, not by zero
        std = np.sqrt(np.maximum(squares / pixels - mean**2, 1.0))
        return _rounded(mean / 255), _rounded(std / 255)


def _rounded(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(round(float(value), 6) for value in values)


def as_pixels(x: Array, where: str) -> Images:
    """Convert images to uint8 [N, C, H, W], from integers 0..255 or floats 0..1; [N, H, W], [N, H, W, C] or [N, C, H, W] with C 1 or 3.

    An ambiguous array is read with channels last.
    """
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[3] in _CHANNELS:
        x = x.transpose(0, 3, 1, 2)
    elif x.ndim != 4 or x.shape[1] not in _CHANNELS:
        raise DataError(
            f"{where}: images of shape {list(x.shape)}, expected [N, H, W], [N, H, W, C] or [N, C, H, W] with 1 or 3 channels"
        )
    return np.ascontiguousarray(_levels(x, where))


def as_labels(y: Array, classes: Sequence[str], where: str) -> Labels:
    """Convert class ids to int64 [N], all within the class list. Raises DataError, which names the first that is not."""
    ids = class_ids(y, where)
    wrong = np.flatnonzero(ids >= len(classes))
    if len(wrong):
        index = int(wrong[0])
        raise DataError(
            f"{where}: label {ids[index]} at index {index} ({len(wrong)} such labels) is outside the {len(classes)} classes"
            f" 0..{len(classes) - 1} ({shortened(classes, 10)})"
        )
    return ids


def class_ids(y: Array, where: str) -> Labels:
    """Convert class ids without a class list to int64 [N], 0 to MAX_CLASSES - 1. Raises DataError."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(f"{where}: labels are {y.dtype} {list(y.shape)}, expected whole numbers [N]")
    wrong = np.flatnonzero((y < 0) | (y >= MAX_CLASSES))
    if len(wrong):
        raise DataError(
            f"{where}: label {y[wrong[0]]} at index {wrong[0]}, expected 0..{MAX_CLASSES - 1} at most"
        )
    return y.astype(np.int64)


def _levels(x: Array, where: str) -> Images:
    if x.dtype == np.uint8:
        return x
    kind = x.dtype.kind
    if kind not in "iuf":
        raise DataError(f"{where}: images are {x.dtype}, expected uint8 (0..255) or floats (0..1)")
    top = 1 if kind == "f" else 255
    if x.size and not (x.min() >= 0 and x.max() <= top):  # NaN fails both comparisons
        raise DataError(f"{where}: {x.dtype} images range over {x.min():g}..{x.max():g}, expected 0..{top}")
    return (x if kind != "f" else np.rint(x * 255)).astype(np.uint8)
