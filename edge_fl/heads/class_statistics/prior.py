"""The prior of a release, made from a fleet's class statistics: a linear discriminant, and the choice of the classes that are used.

    W = Σ⁻¹ μ / length,    b = -½ μᵀ Σ⁻¹ μ - W centre        on directions of features

The class means μ and the covariance Σ within classes follow from the statistics alone; Σ is that of P u in the projection's directions and
the same in all others. Every class weighs the same. The centre is that of the fleet, moved towards the device's own with its labels.
`edge_fl.heads.fleet` makes the fleet's head of it, `edge_fl.heads.served` adapts it to the device's labels.

Which classes of the prior are used is decided before, one by one: a masked sum can hold anything about a class. The own pictures of class c
have the mean m_c. Its component along the prior's, ⟨m_c, μ_c⟩ / |μ_c|, is above 0 if the prior is honest, and below for other
directions of the centred space on average; single pictures scatter. A class below 0, with one or two pictures further below, loses its
part of the covariance. With one or two pictures it counts as unknown; with more it takes the own mean, and the centre is the device's own.
If more than a third are below, there is no prior. Leave-one-out errors by class cannot decide it: of a class with one label, a head
without it knows nothing.

Sources: class means and pooled covariance as in FedCGS (AAAI 2025); fleets of generative statistics in FedPFT (A. Beitollahi et al., 2024).
The ridge, the centre and the choice of the classes are choices of edge-fl (docs/class-statistics.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_fl.errors import StatisticsError
from edge_fl.heads.class_statistics.sums import (
    SHORTEST,
    Doubles,
    Labels,
    Statistics,
    class_centre,
    from_arrays,
    lift,
    project,
    unit,
)
from edge_fl.heads.head import Array

Mask = NDArray[np.bool_]

PRIOR = "prior"
"""Name of the extra with the fleet's statistics."""
DISCRIMINANT_RIDGE = 0.015
STEADY = 4.0
"""Classes with labels at which the device's centre is half its own and half the fleet's."""
LEAST_COUNT = 0.5
"""Of a class that the prior knows; noise makes other counts than 0 of an unknown one."""
SCATTER = 1.5
"""In medians over classes: how far the component of one own picture may be below the median; of n pictures the root of n less."""
LEAST_OWN = 3
"""Own pictures of a class that is not trusted, from which on their mean takes its place."""
LEAST_TRUSTED = 2 / 3
"""Of the classes with own labels that the prior knows, for using it at all."""


def own_means(u: Doubles, y: Labels) -> Doubles:
    """The class means [k, d] of directions u [n, d] with labels y, centred and scaled as class statistics are."""
    centred = unit(u - class_centre(u, y))
    return np.stack([centred[y == label].mean(axis=0) for label in np.unique(y)])


def trusted_classes(prior: Statistics, classes: Labels, own: Doubles, pictures: Labels) -> Mask:
    """Which of the `classes` [k] the prior describes as the `own` means [k, d] of so many `pictures` [k] do -> bool [k]."""
    known = prior.counts[classes] > LEAST_COUNT
    if not known.any():
        return known
    towards = unit(_means(prior, classes, own.shape[1]))
    component = (own * towards).sum(axis=1)
    median = float(np.median(component[known]))
    least = median * np.minimum(1 - SCATTER / np.sqrt(pictures), 0)
    return np.asarray(known & (component >= least) & (median > 0))


def _solve(x: Doubles, values: Doubles, vectors: Doubles, rest: float) -> Doubles:
    """x [k, d] times the inverse of the covariance within classes plus DISCRIMINANT_RIDGE."""
    inside, others = project(x, len(vectors)), rest + DISCRIMINANT_RIDGE
    scaled = (inside @ vectors) / (values + DISCRIMINANT_RIDGE) @ vectors.T - inside / others
    return np.asarray(lift(scaled, x.shape[1]) + x / others)


def _means(prior: Statistics, classes: Labels, dim: int) -> Doubles:
    """The prior's class means [k, d]; 0 of a class that it does not know."""
    counts = np.where(prior.counts[classes] > LEAST_COUNT, prior.counts[classes], np.inf)
    return lift(prior.sums[classes] / counts[:, None], dim)


def _within(prior: Statistics, wrong: Labels, means: Doubles) -> tuple[Doubles, Doubles, float]:
    """Eigenvalues and eigenvectors of the covariance within classes in the projected directions, and the variance in all others.

    The classes `wrong`, with the prior's `means` [w, d], count with their mean alone. Right and wrong pictures scatter along this
    mean; there the variance is that of the other directions.
    """
    counts, dim = prior.counts, means.shape[1]
    seen = np.flatnonzero(counts > LEAST_COUNT)
    wrong, means = wrong[np.isin(wrong, seen)], means[np.isin(wrong, seen)]
    total = counts.sum() - counts[wrong].sum()
    every = _means(prior, seen, dim)
    inner = project(every, len(prior.moment))
    within = prior.moment / total - (inner.T * (counts[seen] / total)) @ inner
    trace = float(np.trace(within))
    if len(wrong):
        along = np.linalg.qr(project(means, len(within)).T)[0]
        across = np.eye(len(within)) - along @ along.T
        within = across @ within @ across
        within += np.trace(within) / max(len(within) - len(wrong), 1) * along @ along.T
    values, vectors = np.linalg.eigh(within)
    values = np.maximum(values, 0)  # noise and rounding can make them negative
    spread = counts.sum() / total - float(counts[seen] @ np.square(every).sum(axis=1)) / total
    spread += float(np.trace(within)) - trace
    return values, vectors, max((spread - float(values.sum())) / max(dim - len(within), 1), 0.0)


def received(arrays: Mapping[str, Array], classes: int, dim: int) -> Statistics:
    """The statistics in an extra of a release, for `classes` classes and features of `dim` dimensions. Raises StatisticsError."""
    prior = from_arrays(arrays)
    shape = prior.shape
    if shape.classes > classes or max(shape.width, shape.projected) > dim:
        raise StatisticsError(f"{shape}, expected at most {classes} classes and {dim} features")
    return prior.grown(classes)


class Discriminant(NamedTuple):
    """weights [C, d] and bias [C] on directions, which classes are known (bool [C]), and the centre [d] of the device's directions.

    pictures: how many pictures of each known class the prior has, the harmonic mean over classes.
    """

    weights: Doubles
    bias: Doubles
    known: Mask
    centre: Doubles
    pictures: float


def discriminant(prior: Statistics, u: Doubles, y: Labels) -> Discriminant:
    """The linear discriminant of the prior on directions.

    u [n, d] with class ids y [n]: the device's own samples, which decide which classes are used, and where the centre is; n may be 0.
    """
    dim, classes = u.shape[1], np.arange(len(prior.counts))
    known = prior.counts > LEAST_COUNT
    own, counts = np.zeros((len(classes), dim)), np.bincount(y, minlength=len(classes))
    wrong = np.zeros(len(classes), bool)
    present, pictures = np.unique(y, return_counts=True)
    if len(present) > 1:
        own[present] = own_means(u, y)
        believed = trusted_classes(prior, present, own[present], pictures)
        seen = known[present]
        if believed.sum() < max(2, LEAST_TRUSTED * seen.sum()):
            nothing = np.zeros((len(classes), dim))
            return Discriminant(nothing, nothing[:, 0], np.zeros(len(classes), bool), nothing[0], 0.0)
        wrong[present[seen & ~believed]] = True
    means, right, replaced = _means(prior, classes, dim), known & ~wrong, wrong & (counts >= LEAST_OWN)
    values, vectors, rest = _within(prior, classes[wrong], means[wrong])
    means[wrong], steady = 0, STEADY
    if replaced.any():  # means of few pictures are too long
        lengths = [np.linalg.norm(of[right & (counts > 0)], axis=1) for of in (means, own)]
        means[replaced] = float(np.median(lengths[0] / np.maximum(lengths[1], SHORTEST))) * own[replaced]
        steady = 0.0  # what is wrong about a class is in the fleet's centre, too
    known = right | replaced
    solved = _solve(means, values, vectors, rest)
    bias = -0.5 * (solved * means).sum(axis=1)
    centre, length = _centre(prior, means, u[right[y]], y[right[y]], steady)
    weights = solved / length
    counted = float(known.sum() / np.sum(1 / prior.counts[known])) if known.any() else 0.0
    return Discriminant(weights, np.where(known, bias - weights @ centre, 0.0), known, centre, counted)


def _centre(prior: Statistics, means: Doubles, u: Doubles, y: Labels, steady: float) -> tuple[Doubles, float]:
    """The device's centre [d], and the usual length of a centred direction.

    It is that of the fleet, moved as far as the own samples show: half the way with labels of `steady` classes, all the way if this is 0.
    """
    total = max(float(prior.counts.sum()), 1.0)
    centre = prior.centre / total
    length = _length(centre)
    present = np.unique(y)
    if len(present):
        found = np.stack([u[y == label].mean(axis=0) for label in present]) - length * means[present]
        centre = centre + len(present) / (steady + len(present)) * (found.mean(axis=0) - centre)
        length = _length(centre)
    return centre, length


def _length(centre: Doubles) -> float:
    """The usual length of a vector of length 1 less their mean."""
    return float(np.sqrt(max(1 - float(centre @ centre), SHORTEST)))
