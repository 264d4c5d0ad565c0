"""The prior of a release, made from a fleet's class statistics, and the cosine head that is shrunk towards it.

The prior head W₀ is the ridge regression of the one-hot labels on the fleet's features, computed from their statistics alone: class
means μ_c, and the covariance within classes, which is that of P u in the projection's directions and the same in all others. Every class
weighs the same.

    own    min_W Σ_i |t_i - W u_i - b|² + ρ |W - a W₀|²        (maximum a posteriori under a Gaussian prior around a W₀)

ρ is the cosine head's own, so with many labels the prior vanishes. The share a in {0, 1/2, 1} has the smallest leave-one-out error of the
own labels, in closed form; 0 is the cosine head without a prior. Only classes with own labels are predicted.

Sources: class means and pooled covariance as in FedCGS (AAAI 2025); fleets of generative statistics in FedPFT (A. Beitollahi et al., 2024).
Ridge regression and the leave-one-out shrinkage are choices of edge-fl (docs/class-statistics.md).
"""

from __future__ import annotations

import numpy as np

from edge_fl.errors import ArtefactError, StatisticsError
from edge_fl.heads.head import TrainingSet
from edge_fl.heads.linear import SHARPNESS, Cosine, direction, leverage, regress
from edge_fl.heads.statistics.class_statistics import (
    Doubles,
    Labels,
    Statistics,
    from_arrays,
    lift,
    project,
)

PRIOR = "prior"
"""Name of the extra with the fleet's statistics."""
RIDGE = 0.005
LEAST_COUNT = 0.5
"""Of a class that the prior knows; noise makes other counts than 0 of an unknown one."""
SHARES = (1.0, 0.5, 0.0)


def fit(data: TrainingSet) -> Cosine:
    """Fit the cosine head of `data`, which has two or more classes, shrunk towards the extra PRIOR.

    Raises ArtefactError if the extra does not fit the features or the classes.
    """
    prior, present = _received(data), data.present
    known = np.flatnonzero(prior.counts[present] > LEAST_COUNT)
    if len(known) < 2:
        return Cosine.fit(data)
    u = direction(data.z).astype(np.float64)
    weights = np.zeros((len(present), u.shape[1]))
    weights[known] = ridge_head(prior, present[known], u.shape[1])
    # one regression of the labels, and of the prior's answers: what the own head would learn of them
    targets = np.hstack([data.y[:, None] == present, u @ weights.T])
    fitted, bias = regress(u, targets, data.weights)
    left_out = (targets - (u @ fitted.T + bias)) / (1 - leverage(u, data.weights)[:, None])
    (own, overlap), (bias, shift) = np.split(fitted, 2), np.split(bias, 2)
    of_labels, of_prior = np.split(left_out * np.sqrt(data.weights)[:, None], 2, axis=1)
    share = min(SHARES, key=lambda a: float(np.square(of_labels - a * of_prior).sum()))
    return Cosine(
        data.classes,
        data.extractor,
        np.ascontiguousarray(SHARPNESS * (own + share * (weights - overlap)), np.float32),
        (SHARPNESS * (bias - share * shift)).astype(np.float32),
        present,
    )


def ridge_head(prior: Statistics, classes: Labels, dim: int) -> Doubles:
    """W₀ [k, d] for `classes`, all of which the prior knows; the device's own regression has the intercept."""
    counts, seen = prior.counts, prior.counts > LEAST_COUNT
    total = counts.sum()
    every = lift(prior.sums[seen] / counts[seen, None], dim)
    inner = project(every, len(prior.moment))
    within = prior.moment / total - (inner.T * (counts[seen] / total)) @ inner
    values, vectors = np.linalg.eigh(within)
    values = np.maximum(values, 0)  # noise and rounding can make them negative
    spread = 1 - float(counts[seen] @ np.square(every).sum(axis=1)) / total
    rest = max((spread - float(values.sum())) / max(dim - len(within), 1), 0.0)

    def solve(x: Doubles) -> Doubles:
        """x [k, d] times the inverse of the covariance plus RIDGE."""
        inside = project(x, len(within))
        scaled = (inside @ vectors) / (values + RIDGE) @ vectors.T - inside / (rest + RIDGE)
        return np.asarray(lift(scaled, dim) + x / (rest + RIDGE))

    means = lift(prior.sums[classes] / counts[classes, None], dim)
    between = (means - means.mean(axis=0)) / np.sqrt(
        len(classes)
    )  # its Gram matrix is the covariance between classes
    solved = solve(between)
    gram = np.eye(len(classes)) + solved @ between.T
    return np.asarray(np.linalg.solve(gram, solved) / np.sqrt(len(classes)))


def _received(data: TrainingSet) -> Statistics:
    try:
        prior = from_arrays(data.extras[PRIOR])
    except StatisticsError as error:
        raise ArtefactError(
            f"extra {PRIOR!r}: {error.message}", "manifest", consequence="no head was fitted"
        ) from error
    shape, dim = prior.shape, data.z.shape[1]
    if shape.classes > data.classes or max(shape.width, shape.projected) > dim:
        raise ArtefactError(
            f"extra {PRIOR!r}: {shape}, expected at most {data.classes} classes and {dim} features",
            "manifest",
            consequence="no head was fitted",
        )
    return prior.grown(data.classes)
