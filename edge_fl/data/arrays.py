"""Validation and conversion of arrays from files or functions to `Samples`."""

from collections.abc import Sequence

import numpy as np

from edge_fl.data.samples import Array, Images, Labels, Samples
from edge_fl.errors import DataError

MAX_CLASSES = 10_000
_CHANNELS = (1, 3)


def samples(x: Array, y: Array, classes: Sequence[str], where: str) -> Samples:
    """Build validated samples. Raises DataError whose message starts with `where` (a file, a function)."""
    images = pixels(x, where)
    if len(y) != len(images):
        raise DataError(f"{where}: {len(images)} images but {len(y)} labels, expected one label per image")
    return Samples(images, labels(y, classes, where))


def pixels(x: Array, where: str) -> Images:
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


def labels(y: Array, classes: Sequence[str], where: str) -> Labels:
    """Convert class ids to int64 [N], all within the class list. Raises DataError, which names the first that is not."""
    ids = class_ids(y, where)
    wrong = np.flatnonzero(ids >= len(classes))
    if len(wrong):
        index = int(wrong[0])
        raise DataError(
            f"{where}: label {ids[index]} at index {index} ({len(wrong)} such labels) is outside the {len(classes)} classes"
            f" 0..{len(classes) - 1} ({shortened(classes)})"
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


def shortened(names: Sequence[str], most: int = 10) -> str:
    """The first `most` of `names` in one line."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


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
