"""Types for labelled samples of any kind: samples, one client's three sets, and a whole dataset.

Samples have the shape and dtype of an `InputSpec`, class ids are int64 [N]. Values are validated once, at construction; `Samples.of`
converts other arrays. Samples of one group (of one recording, burst or person) belong together: no split cuts a group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edge_fl import modalities
from edge_fl.errors import DataError, shortened
from edge_fl.files.npz import Array as Array
from edge_fl.inputs import KINDS, InputSpec, Kind

Labels = NDArray[np.int64]
Indices = NDArray[np.int64]
Groups = NDArray[np.int64]
MAX_CLASSES = 10_000
FORMS = {(dtype, 1 + len(axes)): f"{dtype} [{', '.join(('N', *axes))}]" for axes, (_, dtype) in KINDS.items()}
"""Forms of samples by dtype and dimensions."""
NO_GROUPS: Groups = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples x [N, ...] with class ids y int64 [N]; N may be 0. Raises DataError for anything else.

    groups: a number per sample, int64 [N]; samples with the same number belong together. Empty: all are alone.
    """

    x: Array
    y: Labels
    groups: Groups = field(default_factory=lambda: NO_GROUPS)

    def __post_init__(self) -> None:
        if (str(self.x.dtype), self.x.ndim) not in FORMS:
            raise DataError(
                f"samples: x is {self.x.dtype} {list(self.x.shape)}, expected {', '.join(FORMS.values())}"
            )
        if self.y.dtype != np.int64 or self.y.shape != self.x.shape[:1]:
            raise DataError(
                f"samples: y is {self.y.dtype} {list(self.y.shape)}, expected int64 [{len(self.x)}]"
            )
        if len(self) and self.y.min() < 0:
            raise DataError(f"samples: label {self.y.min()} at index {self.y.argmin()}, expected 0 or more")
        if self.groups.dtype != np.int64 or len(self.groups) not in (0, len(self)):
            raise DataError(
                f"samples: groups are {self.groups.dtype} {list(self.groups.shape)}, expected int64 [{len(self)}]"
            )

    @classmethod
    def of(
        cls,
        x: Array,
        y: Array,
        classes: Sequence[str],
        where: str,
        kind: Kind = "picture",
        groups: Array | None = None,
    ) -> Samples:
        """Samples of a kind from arrays as files have them. Raises DataError whose message starts with `where` (a file, a function).

        groups: numbers or strings [N]; samples with the same one belong together, those with "" to none.
        """
        found, about = modalities.of(kind).arrays(x, where), modalities.ABOUT[kind]
        if len(y) != len(found):
            raise DataError(
                f"{where}: {len(found)} {about.samples} but {len(y)} labels, expected one label per {about.sample}"
            )
        return cls(found, as_labels(y, classes, where), as_groups(groups, len(y), where))

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.x.shape[1:]

    def take(self, indices: Indices) -> Samples:
        """The samples at `indices`, copied in that order."""
        groups = self.groups[indices] if len(self.groups) else self.groups
        return Samples(self.x[indices], self.y[indices], groups)

    def counts(self, classes: int) -> Labels:
        """Samples per class, int64 [classes]."""
        return np.bincount(self.y, minlength=classes).astype(np.int64)

    def fingerprint(self) -> str:
        """sha256 over shape, values, labels and groups; the same on every machine."""
        digest = hashlib.sha256(f"{self.x.shape}".encode())
        digest.update(np.ascontiguousarray(self.x).data)
        digest.update(np.ascontiguousarray(self.y, dtype="<i8").data)
        digest.update(np.ascontiguousarray(self.groups, dtype="<i8").data)
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

    `classes` names the class ids. `original_test` bool [N] marks the original test samples. With several domains, `domains` int64 [N] gives
    the domain of each sample and `domain_names` their names; otherwise both are empty. `given` is what a file says of its samples, if they
    are not pictures.
    """

    name: str
    samples: Samples
    classes: tuple[str, ...]
    original_test: NDArray[np.bool_] | None = None
    domains: Indices | None = None
    domain_names: tuple[str, ...] = field(default=())
    given: InputSpec | None = None

    @property
    def kind(self) -> Kind:
        """What a sample is."""
        return self.given.kind if self.given else "picture"

    @cached_property
    def input(self) -> InputSpec:
        """Input of an extractor for these samples, with mean and std per channel (of the original training samples)."""
        held_out = self.original_test
        is_used = np.ones(len(self.samples), bool) if held_out is None or held_out.all() else ~held_out
        return modalities.of(self.kind).input_of(self.samples.x, np.flatnonzero(is_used), self.given)

    def fingerprint(self) -> str:
        """sha256 over the samples, the original test set and the domains."""
        marks = [mark.tobytes() for mark in (self.original_test, self.domains) if mark is not None]
        return hashlib.sha256(self.samples.fingerprint().encode() + b"".join(marks)).hexdigest()


def as_groups(groups: Array | None, count: int, where: str) -> Groups:
    """Convert the groups of `count` samples, numbers or strings, to int64 [N]; empty without any. Samples with "" are alone."""
    if groups is None:
        return NO_GROUPS
    if groups.shape != (count,) or groups.dtype.kind not in "iuUS":
        raise DataError(
            f"{where}: groups are {groups.dtype} {list(groups.shape)}, expected {count} whole numbers or strings, one per sample"
        )
    names = groups.astype(str)
    _, numbers = np.unique(names, return_inverse=True)
    alone = names == ""
    return np.where(alone, numbers.max(initial=0) + 1 + np.arange(count), numbers).astype(np.int64)


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


def numbered(ids: Iterable[Labels]) -> tuple[str, ...]:
    """The class ids of some sets up to the highest one, as names of classes."""
    return tuple(map(str, range(1 + max((int(each.max()) for each in ids if len(each)), default=0))))
