"""How far a sample is from the labelled ones, so that samples of no class of the device can be called unknown.

With the directions u of the features (`edge_fl.heads.linear.direction`), the class means m of the labelled ones and their mean o,

    distance = (1 - max_c cos(u, m_c)) (1 - max_c cos(u - o, m_c - o))

The first factor is large where a sample is unlike all labelled ones, the second one where it lies between the classes.

Samples without a label tell more, if some of them are of no class: `apart` is the mean direction from o of those that are furthest by this
distance, a share FURTHEST of them, and

    distance = 1 - max_c cos(u - o, m_c - o) + cos(u - o, apart)

It is used only if it calls more of them unknown than the first distance does, and more than false alarms explain (`by_chance`); each is
then measured without its own part of `apart`. Without that, it would look for what only chance set apart.

Every labelled sample has the distance that it has without its fold, also from the choice of `apart`. Class means of fewer samples are
longer, in the square by the variance of a mean; so those without a fold are divided by the lengths of the means of all samples.

Sources: learning from labelled and unlabelled samples what is new: G. Blanchard et al., "Semi-Supervised Novelty Detection", JMLR 2010;
the share of calibration samples that are as far: V. Vovk et al., "Algorithmic Learning in a Random World", 2005. Compared with Mahalanobis
distances and others by `python -m tools.study.unknowns`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from edge_fl.heads.head import Features
from edge_fl.heads.linear import direction

FURTHEST = 0.2
"""Share of the samples without a label that `apart` is the mean of."""
ALARM, Z95 = 0.05, 1.645
"""Share of false alarms, and quantile of a normal distribution, with which the two distances are compared."""
SHORTEST = 1e-3
"""Of a mean, or of its part that no other class has, which is 0 with a single class."""

Labels = NDArray[np.int64]
Weights = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class KnownClasses:
    """The `classes` int64 [k] that have labels, the means float32 [k, d] of their directions, and `apart` float32 [d], empty if unused."""

    classes: Labels
    means: Features
    apart: Features

    def distances(self, z: Features) -> Features:
        """Features z [n, d] -> distances float32 [n] from the labelled samples."""
        near = _Nearness(direction(z), self, self)
        return near.with_apart(self.apart) if len(self.apart) else near.plain


NO_CLASSES = KnownClasses(np.empty(0, np.int64), np.empty((0, 0), np.float32), np.empty(0, np.float32))


class _Nearness:
    """How near directions u [n, d] are to the means of `known`; the lengths of these are those of the means in `lengths`."""

    def __init__(self, u: Features, known: KnownClasses, lengths: KnownClasses) -> None:
        rows = np.searchsorted(lengths.classes, known.classes)
        long = _lengths(lengths.means)[rows, 0]
        long_centred = _lengths(lengths.means - lengths.means.mean(axis=0))[rows, 0]
        self._u, self._centre = u, known.means.mean(axis=0)
        products, of_means = u @ known.means.T, known.means @ self._centre
        of_centre = products.mean(axis=1)
        squares = np.square(u).sum(axis=1) - 2 * of_centre + of_means.mean()
        self._length = np.maximum(np.sqrt(np.maximum(squares, 0)), SHORTEST)
        centred = (products - of_centre[:, None] - of_means + of_means.mean()) / self._length[:, None]
        self._between = 1 - (centred / long_centred).max(axis=1)
        self.plain: Features = (1 - (products / long).max(axis=1)) * self._between

    def with_apart(self, apart: Features) -> Features:
        """The distances [n] with the direction `apart`."""
        return np.asarray(self._between + (self._u @ apart - self._centre @ apart) / self._length)

    @property
    def furthest(self) -> Labels:
        """The rows [f] of the furthest ones."""
        return np.argsort(-self.plain, kind="stable")[: max(1, int(FURTHEST * len(self.plain)))]

    def centred(self, rows: Labels) -> Features:
        """The directions [f, d] of these rows from the centre."""
        return np.asarray((self._u[rows] - self._centre) / self._length[rows, None])


def percentiles(distances: Features, weights: Weights, new: Features) -> Features:
    """Distances [n] -> the share of those [m] of labelled samples, which have these weights [m], that are smaller, float32 [n].

    1 minus it is a conformal p-value: at most a share ε of samples like the labelled ones is above 1 - ε.
    """
    order = np.argsort(distances, kind="stable")
    below = np.concatenate([[0.0], np.cumsum(weights[order])])
    places = np.searchsorted(distances[order], new)
    shares: Features = (below[places] / (below[-1] + 1)).astype(np.float32)
    return shares


def by_chance(rate: float, scenes: float, n: int) -> float:
    """The share of n known samples that false alarms exceed 5 times in 100, at a rate that labelled samples of so many `scenes` set."""
    return float(rate + Z95 * np.sqrt(rate * (1 - rate) * (1 / scenes + 1 / n)))


def measured(
    z: Features, y: Labels, folds: Sequence[tuple[Labels, Labels]], weights: Weights, unlabelled: Features
) -> tuple[KnownClasses, Features]:
    """What is known of the classes of samples z [n, d] with class ids y [n], and the distances float32 [m] of the samples in `folds`.

    folds: the rows of each, and those of the samples that it leaves; m rows in all, in the order of the folds. weights [m]: how much each
    counts; their sum is the number of scenes. unlabelled [p, d]: features of samples without a label; p may be 0.
    """
    u, pool = direction(z), direction(unlabelled.reshape(-1, z.shape[1]))
    known = _of(u, y)
    seen = _Nearness(pool, known, known)
    parts = seen.centred(seen.furthest) if len(pool) else pool
    length = float(_lengths(parts.sum(axis=0))[0])
    plain, apart = list[Features](), list[Features]()
    for fold, rest in folds:
        if not len(rest):
            plain.append(np.ones(len(fold), np.float32))
            continue
        without = _of(u[rest], y[rest])
        near = _Nearness(u[fold], without, known)
        plain.append(near.plain)
        if len(pool):
            others = _Nearness(pool, without, known)
            apart.append(near.with_apart(others.centred(others.furthest).sum(axis=0) / length))
    distances = np.concatenate(plain)
    if not len(pool) or len(plain) > len(apart):
        return known, distances
    total = parts.sum(axis=0)
    found = seen.with_apart(total / length)
    alone = (parts * (total - parts)).sum(axis=1) * len(parts) / (max(len(parts) - 1, 1) * length)
    found[seen.furthest] += alone - parts @ total / length
    with_apart = np.concatenate(apart)
    unknown = [
        float((percentiles(own, weights, new) > 1 - ALARM).mean())
        for own, new in ((distances, seen.plain), (with_apart, found))
    ]
    if unknown[1] <= max(unknown[0], by_chance(ALARM, float(weights.sum()), len(pool))):
        return known, distances
    return replace(known, apart=(total / length).astype(np.float32)), with_apart


def _of(u: Features, y: Labels) -> KnownClasses:
    classes = np.unique(y)
    means = np.stack([u[y == label].mean(axis=0) for label in classes])
    return KnownClasses(classes, means, np.empty(0, np.float32))


def _lengths(rows: Features) -> Features:
    return np.asarray(np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), SHORTEST))
