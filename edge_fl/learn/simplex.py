"""Weights that are at least 0 and sum to 1: the quadratic programme by which FedPAC combines heads (METHODS.md F11)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from edge_fl.learn.aggregation.mean import mixture
from edge_fl.learn.tree import Params

NEGLIGIBLE = 1e-3  # a smaller weight is taken as 0
SMALLEST_EIGENVALUE = 0.01  # what is kept of a matrix that is not positive semidefinite
ROUNDING = 1e-9  # relative; an eigenvalue just below 0 is a rounding error


def minimise(quadratic: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """argmin of a' P a over a >= 0, sum a = 1, for symmetric P [N, N]; None when it cannot be found.

    Up to its scale, a is the non-negative least-squares solution of |L' a|^2 + (sum a - 1)^2 with P = L L', which an active-set
    method finds exactly. A P that is not positive semidefinite loses its eigenvalues below 0.01 first.
    """
    from scipy.optimize import nnls

    if not np.isfinite(quadratic).all():
        return None
    scale = np.abs(quadratic).max() or 1.0
    values, vectors = np.linalg.eigh(quadratic / scale)
    if values.min() < -ROUNDING:
        values = np.where(values * scale < SMALLEST_EIGENVALUE, 0.0, values)
    rows = np.sqrt(values.clip(min=0))[:, None] * vectors.T
    try:
        weights, _ = nnls(np.vstack([rows, np.ones(len(rows))]), np.append(np.zeros(len(rows)), 1.0))
    except RuntimeError:  # its iterations ran out
        return None
    weights = weights / weights.sum()
    weights = np.where(weights < NEGLIGIBLE, 0.0, weights)
    normalised: NDArray[np.float64] = weights / weights.sum()
    return normalised


def mixtures(
    variance: NDArray[np.float64], means: NDArray[np.float64]
) -> Iterator[NDArray[np.float64] | None]:
    """For each of N clients the weights of all N heads that promise it the least error, or None (FedPAC Eq. 11).

    `variance` [N] and `means` [N, K] describe the features: how much a head errs by variance, and how far clients are apart (bias).
    """
    for mine in means:
        apart = mine - means
        yield minimise(np.diag(variance) + apart @ apart.T)


def combined(heads: Sequence[Params], spreads: Sequence[Params]) -> Iterator[Params]:
    """For each client, known by the `spread` of its features, the mixture of all heads; its own where none can be found."""
    v, h = (np.array([s[key].cpu().numpy().ravel() for s in spreads], np.float64) for key in ("V", "H"))
    for own, weights in zip(heads, mixtures(v.ravel(), h), strict=True):
        yield own if weights is None else mixture(heads, weights)
