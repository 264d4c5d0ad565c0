"""Head updates that a head-only device may send, one pure function per kind (docs/methods-on-devices.md, "Device tiers").

Each takes the part's name, the data and the fitted head, and returns the part as the method's `aggregate` expects it. The names are a
closed list; the signed manifest selects from it (`HeadPlan.uploads`), and the device's owner can turn all of them off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl.heads.descent import descend, one_hot, probabilities, received
from edge_fl.heads.head import Array, Head, TrainingSet
from edge_fl.heads.plan import HeadUpdateKind
from edge_fl.heads.tuned import Tuned, ridge_sums
from edge_fl.heads.two_heads import Gated

Part = dict[str, Array]


def compute(data: TrainingSet, head: Head) -> dict[str, Part]:
    """Compute all head updates that the release's plan names, by part. Raises ArtefactError, RunError."""
    updates = {part: HEAD_UPDATES[kind](part, data, head) for part, kind in data.plan.uploads.items()}
    return {part: _finite(arrays, part) for part, arrays in updates.items() if arrays}


def require_allowed(parts: Mapping[str, object], uploads: Mapping[str, HeadUpdateKind]) -> None:
    """Raise ArtefactError if a part is not named by the manifest."""
    if unlisted := sorted(parts.keys() - uploads.keys()):
        raise ArtefactError(
            f"head update: part {unlisted[0]!r}, the release requests {', '.join(uploads) or 'none'}",
            Failure.REJECTED,
            consequence="nothing was sent",
        )


def taught_head(part: str, data: TrainingSet, head: Head) -> Part:
    """The received head after one epoch on labels and the personal head's predictions (FedCRC stage 3, Eqs. 6 and 7)."""
    targets = one_hot(data) + probabilities(head.logits(data.z))
    return descend(received(data, part), data, targets, epochs=1, min_steps=0, pull=0.0).arrays()


def trained_head(part: str, data: TrainingSet, head: Head) -> Part:
    """The received head after the method's epochs on labels (DualFed stage 2)."""
    return descend(received(data, part), data, min_steps=0, pull=0.0).arrays()


def fitted_head(part: str, data: TrainingSet, head: Head) -> Part:
    """The method's own head (FedPAC: the server combines these heads), whatever the device serves."""
    return (head if isinstance(head, Tuned) else Tuned.fit(data)).raw().arrays()


def half_head(part: str, data: TrainingSet, head: Head) -> Part:
    """The mean of the method's personal and the received head (FedCP), whatever the device serves."""
    own = head if isinstance(head, Gated) else Gated.fit(data)
    return {"weight": (own.weights + own.theirs) / 2, "bias": (own.bias + own.theirs_bias) / 2}


def class_means(part: str, data: TrainingSet, head: Head) -> Part:
    """mean [C_i, d] of the classes present, and count [C] (F12)."""
    means = [data.z[data.y == label].mean(axis=0, dtype=np.float64) for label in data.present]
    count = np.bincount(data.y, minlength=data.classes)
    return {"mean": np.stack(means).astype(np.float32), "count": count.astype(np.float32)}


def sums(part: str, data: TrainingSet, head: Head) -> Part:
    """A as gram [d, d] and B as moment [d, C] (SphereFed's calibration)."""
    a, b = ridge_sums(data)
    return {"gram": a, "moment": b}


def spread(part: str, data: TrainingSet, head: Head) -> Part:
    """V and H [C, d] with H[c] = π_c μ_c: variance of the features within their classes (FedPAC)."""
    z, n = data.z.astype(np.float64), len(data.y)
    members = one_hot(data)
    h = members.T @ z / n
    share = members.mean(axis=0, dtype=np.float64)
    seen = share > 0
    within = (members.T @ np.square(z).sum(axis=1))[seen] / n - np.square(h[seen]).sum(axis=1)
    return {"V": np.array(within.sum() / n, np.float32), "H": h.astype(np.float32)}


def _finite(part: Part, name: str) -> Part:
    if all(np.isfinite(array).all() for array in part.values()):
        return part
    raise ArtefactError(
        f"head update: part {name!r} has NaN or Infinity", Failure.DIVERGED, consequence="nothing was sent"
    )


HEAD_UPDATES: dict[HeadUpdateKind, Callable[[str, TrainingSet, Head], Part]] = {
    "taught_head": taught_head,
    "trained_head": trained_head,
    "fitted_head": fitted_head,
    "half_head": half_head,
    "class_means": class_means,
    "ridge_sums": sums,
    "spread": spread,
}
