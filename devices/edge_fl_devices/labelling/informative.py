"""Order unlabelled pictures by what a label would add: uncertainty of the head, and novelty among the features."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.float32]


def informative(
    z: Features,
    probabilities: Features | None,
    z_labelled: Features,
    count: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Return `count` rows of the unlabelled features z [n, d], the most informative first.

    probabilities [n, C]: calibrated, from the current head; None without a head: novelty only. z_labelled [m, d] may be empty.
    """
    uncertainty = np.ones(len(z)) if probabilities is None else 1 - _margin(probabilities)
    u, known = _unit(z), _unit(z_labelled)
    nearest = (u @ known.T).max(axis=1) if len(known) else np.zeros(len(z))
    score = uncertainty * (1 - nearest)
    chosen: list[int] = []
    for _ in range(min(count, len(z))):
        best = int(rng.choice(np.flatnonzero(score == score.max())))
        chosen.append(best)
        nearest = np.maximum(nearest, u @ u[best])
        score = uncertainty * (1 - nearest)
        score[chosen] = -1
    return np.array(chosen, np.int64)


def _margin(probabilities: Features) -> Features:
    """Difference of the two largest probabilities."""
    best = np.partition(probabilities, -2, axis=1)[:, -2:]
    margin: Features = best[:, 1] - best[:, 0]
    return margin


def _unit(z: Features) -> Features:
    unit: Features = z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-12)
    return unit
