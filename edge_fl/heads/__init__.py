"""Personal heads by name: fitted on a client's own features with scikit-learn or NumPy, used with NumPy alone (METHODS.md section 5).

To add a head: one final class and one line in HEADS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from edge_fl.errors import ArtefactError, ConfigError, DataError, nearest
from edge_fl.heads.constant import Constant
from edge_fl.heads.head import Array, Head, Lesson
from edge_fl.heads.linear import Logistic, Nearest, Svm
from edge_fl.heads.mlp import Mlp

__all__ = ["HEADS", "Constant", "Head", "Logistic", "Mlp", "Nearest", "Svm", "fit", "from_arrays"]

HEADS: dict[str, type[Head]] = {head.kind: head for head in (Logistic, Svm, Mlp, Nearest, Constant)}


def fit(
    kind: str,
    z: Array,
    y: Array,
    classes: int,
    *,
    unit_norm: bool,
    extractor: str = "",
    seed: int = 0,
    balanced: bool = False,
) -> Head:
    """A head of this kind on features z [n, d] with class ids y [n] out of 0..classes-1; with one class only, a constant head.

    `extractor` is the sha256 of what made z, and `unit_norm` whether it makes features of length 1. The order of the samples does not
    matter. Raises ConfigError for an unknown kind and DataError for features or labels that cannot be used.
    """
    if kind not in HEADS:
        raise ConfigError(f"head {kind!r} is unknown{nearest(kind, HEADS)}; no head was fitted")
    z, y = np.asarray(z, np.float32), np.asarray(y)
    _require_fittable(z, y, classes)
    order = sorted(
        range(len(y)),
        key=lambda row: (int(y[row]), hashlib.blake2b(z[row].tobytes(), digest_size=16).digest()),
    )
    lesson = Lesson(z[order], y[order].astype(np.int64), classes, extractor, unit_norm, seed, balanced)
    return (HEADS[kind] if len(lesson.present) > 1 else Constant).fit(lesson)


def from_arrays(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> Head:
    """The head whose `to_arrays()` and `describe()` these are. Raises ArtefactError for anything else."""
    kind = HEADS.get(metadata.get("kind", ""))
    if kind is None or not metadata.get("classes", "").isascii() or not metadata.get("classes", "").isdigit():
        raise ArtefactError(
            f"head file: described as {dict(metadata)}, expected kind, classes and extractor; not used"
        )
    if arrays.keys() != kind.shapes.keys():
        raise ArtefactError(
            f"{kind.kind} head: holds {', '.join(arrays)}, expected {', '.join(kind.shapes)}; not used"
        )
    classes = int(metadata["classes"])
    sizes = {"C": classes, "one": 1}
    for name, letters in kind.shapes.items():
        found = arrays[name]
        expected = np.int64 if name == "present" else np.float32
        if found.dtype != expected or found.ndim != len(letters):
            raise ArtefactError(
                f"{kind.kind} head: {name} is {found.dtype} {list(found.shape)}, expected {expected.__name__} {letters}; not used"
            )
        if any(
            sizes.setdefault(letter, size) != size for letter, size in zip(letters, found.shape, strict=True)
        ):
            raise ArtefactError(
                f"{kind.kind} head: {name} {list(found.shape)} does not fit the other arrays ({sizes}); not used"
            )
        if not np.isfinite(found).all():
            raise ArtefactError(f"{kind.kind} head: {name} holds NaN or infinity; not used")
    present = arrays.get("present", np.empty(0, np.int64))
    if len(present) and (present[0] < 0 or present[-1] >= classes or np.any(np.diff(present) <= 0)):
        raise ArtefactError(
            f"{kind.kind} head: classes {present.tolist()}, expected ascending ids below {classes}; not used"
        )
    return kind(classes, metadata.get("extractor", ""), **{name: arrays[name] for name in kind.shapes})


def _require_fittable(z: Array, y: Array, classes: int) -> None:
    if z.ndim != 2 or y.shape != z.shape[:1] or not len(y) or y.dtype.kind not in "iu":
        raise DataError(
            f"head: features {list(z.shape)} and {y.dtype} labels {list(y.shape)}, expected [n, d] and n class ids; no head was fitted"
        )
    if y.min() < 0 or y.max() >= classes:
        raise DataError(
            f"head: labels range over {y.min()}..{y.max()}, expected 0..{classes - 1}; no head was fitted"
        )
    if not np.isfinite(z).all():
        raise DataError(
            f"head: {np.sum(~np.isfinite(z).all(axis=1))} of {len(z)} feature rows hold NaN or infinity; no head was fitted"
        )
