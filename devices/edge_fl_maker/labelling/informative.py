"""Order unlabelled pictures by what a label would add: uncertainty of the head plus novelty among the features.

A picture is covered as far as it is similar to a labelled or an already chosen one, by the cosine of their directions. Greedily the picture
is chosen next that adds most to the sum of the pictures' covers, weighted by 1 plus their uncertainty (1 minus the difference of the
two highest probabilities). So it is far from the labelled pictures, typical of others that are, too, and among those that the head
confuses. Without a head all weights are equal: this is the facility location problem, whose greedy solution is within a factor 1 - 1/e
of the best (Nemhauser, Wolsey and Fisher, Mathematical Programming, 1978). `python -m tools.study.label_selection` compares it with a
random choice.
"""

import numpy as np
from numpy.typing import NDArray

from edge_fl.heads.linear import direction

MOST_COVERED = 1000
"""Pictures whose cover is computed, a sample of more."""
MOST_GREEDY = 100
"""Pictures chosen one after the other; the rest follow by what each would add to these."""

Features = NDArray[np.float32]


def informative(
    z: Features,
    probabilities: Features | None,
    z_labelled: Features,
    count: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Return the `count` most informative rows of unlabelled features z [n, d], the best first.

    probabilities [n, C]: calibrated; None without a head. z_labelled [m, d]: may be empty, m = 0.
    """
    u = direction(z)
    sample = rng.permutation(len(u))[:MOST_COVERED]
    similarity = u @ u[sample].T
    covered = np.zeros(len(sample), np.float32)
    if len(z_labelled):
        covered = (direction(z_labelled) @ u[sample].T).max(axis=0)
    weights = np.ones(len(sample), np.float32)
    if probabilities is not None:
        weights += uncertainty(probabilities)[sample]

    def gains() -> Features:
        added: Features = np.maximum(similarity - covered, 0) @ weights
        return added

    chosen: list[int] = []
    left = np.ones(len(u), np.bool_)
    for _ in range(min(count, MOST_GREEDY, len(u))):
        chosen.append(int(np.where(left, gains(), -1).argmax()))
        left[chosen[-1]] = False
        covered = np.maximum(covered, similarity[chosen[-1]])
    rest = np.flatnonzero(left)
    rest = rest[np.argsort(-gains()[rest], kind="stable")]
    return np.concatenate([chosen, rest]).astype(np.int64)[:count]


def uncertainty(probabilities: Features) -> Features:
    """Probabilities [n, C] -> 1 minus the difference of the two highest, [n]."""
    two = np.partition(np.pad(probabilities, ((0, 0), (0, 1))), -2, axis=1)[:, -2:]  # padded: C may be 1
    uncertain: Features = 1 - (two[:, 1] - two[:, 0]).astype(np.float32)
    return uncertain
