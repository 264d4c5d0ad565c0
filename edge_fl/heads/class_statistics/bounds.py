"""What the class statistics of n honest devices can be: a sum, or a single vector, outside these bounds is not used, nor a far class mean.

    counts          0 to MOST_PER_CLASS of each class and device, whole numbers; at most the norm of a clipped vector
    sums            |s_c| <= n_c, because features have length 1
    second moment   trace <= Σ n_c, and no eigenvalue below those of Σ s_c s_cᵀ / n_c, the part between the classes
    centre          |centre| <= Σ n_c, because it is a mean of directions

Clipping multiplies a device's vector by at most 1, which keeps all of these but the whole numbers. Noise with standard deviation σ of each
number moves a number by σ, a length by σ √width, a trace by σ √p and an eigenvalue by 2 σ √p (the norm of a random symmetric matrix);
DEVIATIONS more are allowed, so that noise alone passes in all but one of 10^8 sums. Within the bounds a device can still lie: it may send
32 pictures of a class that it does not have, and in a masked sum take what the other devices left of the bound.

Class means are centred by their device, so that those of the same class point in the same direction whatever the device's style, and those
of different classes away from each other: on average their cosine is below 0. A mean is far from others if its cosine to them is below 0;
how often that happens to honest devices, and what it stops, is in docs/class-statistics.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge_fl.errors import StatisticsError
from edge_fl.heads.class_statistics.sums import (
    MOST_PER_CLASS,
    Doubles,
    Labels,
    Statistics,
    lift,
    project,
    unit,
)

TOLERANCE = 2e-3
"""Above the errors of the fixed point and of means in half precision (1/2,048 of each number), far below one picture."""
DEVIATIONS = 7.0
LEAST_DEVICES = 4
"""Devices with pictures of a class, for comparing its means; of three, two that lie would be the majority."""


@dataclass(frozen=True)
class Senders:
    """Who the statistics are from: `devices` of them, each with a vector of norm at most `clip` (0: not clipped), with noise of standard
    deviation `noise` in every number of the sum.
    """

    devices: int
    clip: float = 0.0
    noise: float = 0.0


def require_possible(found: Statistics, senders: Senders, dim: int) -> None:
    """Raise StatisticsError if no honest devices can have sent this, for features of `dim` dimensions."""
    _require_counts(found.counts, senders)
    counts, lengths = found.counts, np.linalg.norm(found.sums, axis=1)
    slack = senders.noise * (np.sqrt(found.shape.width) + 2 * DEVIATIONS)
    if wrong := np.flatnonzero(lengths > counts + TOLERANCE * (1 + np.abs(counts)) + slack).tolist():
        raise StatisticsError(
            f"class {wrong[0]}: a sum of length {lengths[wrong[0]]:g} of {counts[wrong[0]]:g} features of length 1"
        )
    _require_moment(found, senders, dim)
    _require_centre(found, senders)
    norm, length = float(np.linalg.norm(found.flat)), senders.devices * senders.clip
    chi_square = found.shape.length + 2 * DEVIATIONS * np.sqrt(found.shape.length) + 2 * DEVIATIONS**2
    most = np.sqrt(length**2 + 2 * DEVIATIONS * senders.noise * length + senders.noise**2 * chi_square)
    if senders.clip and norm > most * (1 + TOLERANCE):
        raise StatisticsError(f"norm {norm:g} of {senders.devices} vectors clipped to {senders.clip:g} each")


def _require_counts(counts: Doubles, senders: Senders) -> None:
    slack = TOLERANCE + DEVIATIONS * senders.noise
    inexact = (
        np.abs(counts - np.round(counts)) > TOLERANCE if not senders.clip else np.zeros(len(counts), bool)
    )
    if wrong := np.flatnonzero(inexact | (counts < -slack)).tolist():
        raise StatisticsError(f"class {wrong[0]}: count {counts[wrong[0]]:g}, expected a whole number from 0")
    each = min(MOST_PER_CLASS, senders.clip or MOST_PER_CLASS)
    most = senders.devices * each
    if wrong := np.flatnonzero(counts > most + slack).tolist():
        raise StatisticsError(
            f"class {wrong[0]}: count {counts[wrong[0]]:g} from {senders.devices} devices, expected at most {most:g}:"
            f" {each:g} of each"
        )
    if not senders.clip and counts.sum() < 0.5:
        raise StatisticsError("no picture is counted")


def _require_moment(found: Statistics, senders: Senders, dim: int) -> None:
    total, projected = float(found.counts.sum()), found.shape.projected
    trace = float(np.trace(found.moment))
    slack = TOLERANCE * max(total, 1.0)
    noise = senders.noise * (np.sqrt(projected) + np.sqrt(found.shape.classes))
    if trace > total + slack + DEVIATIONS * noise:
        raise StatisticsError(f"second moment with trace {trace:g} of {total:g} features of length 1")
    within = found.moment
    if found.shape.width == dim and not senders.noise:  # else the sums are known in other directions only
        counted = found.counts > TOLERANCE
        roots = np.sqrt(found.counts[counted])[:, None]
        inner = project(lift(found.sums[counted] / roots, dim), projected)
        within = within - inner.T @ inner
    lowest = float(np.linalg.eigvalsh(within)[0])
    if lowest < -slack - senders.noise * (2 * np.sqrt(projected) + DEVIATIONS):
        raise StatisticsError(
            f"second moment with eigenvalue {lowest:g}"
            + (" after its part between the classes" if within is not found.moment else "")
            + ", expected none below 0"
        )


def _require_centre(found: Statistics, senders: Senders) -> None:
    length, total = float(np.linalg.norm(found.centre)), float(found.counts.sum())
    noise = np.sqrt(found.shape.dim) + DEVIATIONS * (2 + np.sqrt(found.shape.classes))
    if length > total + TOLERANCE * (1 + abs(total)) + senders.noise * noise:
        raise StatisticsError(f"a centre of length {length:g} of {total:g} directions of length 1")


def far_classes(devices: Sequence[Statistics]) -> list[Labels]:
    """The classes of each device whose mean is far from those of the others, by the median of its cosines to them.

    A minority that lies together, also with the same vector, cannot move a median. A device with more than half of its classes far away is
    far in all of them. Classes of fewer than LEAST_DEVICES are not compared.
    """
    known = np.stack([found.counts for found in devices]) >= 0.5
    far = np.zeros(known.shape, bool)
    for label in np.flatnonzero(known.sum(axis=0) >= LEAST_DEVICES):
        have = np.flatnonzero(known[:, label])
        directions = unit(np.stack([devices[place].sums[label] for place in have.tolist()]))
        cosines = directions @ directions.T
        np.fill_diagonal(cosines, np.nan)
        far[have, label] = np.nanmedian(cosines, axis=1) < 0
    most = far.sum(axis=1) > known.sum(axis=1) / 2
    return [np.flatnonzero(row) for row in far | (most[:, None] & known)]
