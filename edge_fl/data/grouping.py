"""Groups: pictures that belong together, because they show the same scene. No split and no fold cuts a group.

Frames of a burst are nearly equal. If one is trained on and another one is tested, the test measures memory, not what the head does on
the next scene. So a group counts once, like one picture: in means, in limits ("20 or more"), and in the interval of an accuracy.

Groups are numbers per picture, int64 [n]: pictures with the same number are one group. An empty array stands for pictures that are all
alone; then every function here gives what it gave without groups.

Near duplicates are found by thumbnails: SIDE x SIDE grey means, of which mean and contrast are removed. Two pictures belong together if
1 minus the cosine of their thumbnails is at most `nearness`. The hash of 64 bits that the pool of unlabelled pictures uses
(`edge_fl_maker.capture.pools`) is no use here: the hash of half of 3,000 pictures of Fashion-MNIST is within 5 bits of another
one's, that of a picture with noise of 6 grey levels is 8 bits from its own. With the thumbnails, of up to 10,000 clean pictures 0.12 % of
Fashion-MNIST are in a group, none of MNIST, 0.30 % of PACS photos, 0.54 % of paintings, 1.2 % of cartoons (some are there twice) and
0.59 % of sketches, in groups of at most 3; of 30 frames that a trembling hand takes of a photo 99 % are in one group
(`python -m tools.study.groups`). Small pictures need the lower limit NEAR_SMALL: with NEAR 36 % of Fashion-MNIST would be in groups of up
to 2,614; so a shift of such a picture by one of its 28 pixels is not noticed.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from edge_fl.data.samples import NO_GROUPS, Labels
from edge_fl.data.samples import Groups as Groups
from edge_fl.modalities import SIDE as SIDE
from edge_fl.modalities import Thumbnails as Thumbnails

Importance = NDArray[np.float64]
"""How many pictures each picture stands for, divided by the mean; empty: all alike."""

NEAR, NEAR_SMALL = 0.03, 0.004
SMALL = 64
"""Shorter side in pixels below which pictures hold little detail, so that different ones are alike."""
FLAT = 2.0
"""Standard deviation of a thumbnail, in grey levels, below which it shows noise only."""
BLOCK = 128
SORTED_ABOVE = 4096
FEW = 20
"""Groups below which an accuracy is called an estimate from few scenes."""
Z80, Z90 = 1.282, 1.645


def alone() -> Groups:
    """Groups of pictures that are all alone, whatever their number."""
    return NO_GROUPS


def numbers(groups: Groups, n: int) -> Groups:
    """Return groups as consecutive numbers [n] in the order of the first picture of each."""
    if not len(groups):
        return np.arange(n)
    _, first, rows = np.unique(groups, return_index=True, return_inverse=True)
    ranks = np.empty(len(first), np.int64)
    ranks[np.argsort(first)] = np.arange(len(first))
    return ranks[rows]


def count(groups: Groups, n: int) -> int:
    """Number of groups of n pictures."""
    return len(np.unique(groups)) if len(groups) else n


def are_alone(groups: Groups) -> bool:
    """Whether no two pictures are in one group."""
    return not len(groups) or len(np.unique(groups)) == len(groups)


def normal(groups: Groups) -> Groups:
    """Return `alone()` if no two pictures are in one group, else the groups as `numbers`."""
    return alone() if are_alone(groups) else numbers(groups, len(groups))


def weights(groups: Groups, n: int, importance: Importance | None = None) -> NDArray[np.float64]:
    """Weights [n] that make every group count once: 1 divided by the size of the picture's group, times its `importance`, if given."""
    shares = np.ones(n)
    if not are_alone(groups):
        _, rows, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        shares = 1 / sizes[rows]
    return shares if importance is None or not len(importance) else shares * importance


def mean(
    values: NDArray[np.bool_] | NDArray[np.float32], groups: Groups, importance: Importance | None = None
) -> float:
    """Mean of values [n] over groups: the mean of each group's mean, weighted by `importance`; NaN without values."""
    if not len(values):
        return math.nan
    if are_alone(groups) and (importance is None or not len(importance)):
        return float(np.mean(values))
    return float(np.average(values.astype(np.float64), weights=weights(groups, len(values), importance)))


def effective(groups: Groups, n: int, importance: Importance | None = None) -> float:
    """The number of equally weighted groups from which a mean would be as certain as from these; L. Kish, "Survey Sampling", 1965."""
    if not n or importance is None or not len(importance):
        return float(count(groups, n))
    totals = np.bincount(numbers(groups, n), weights(groups, n, importance))
    return float(totals.sum() ** 2 / np.square(totals).sum())


def interval(share: float, count: float, z: float = Z90) -> tuple[float, float]:
    """Wilson's interval of a share that was measured on `count` independent groups, of 90 % for `z` = Z90; (0, 1) without any.

    A share of groups that are not independent has fewer than there are, which need not be a whole number.
    """
    if not count:
        return 0.0, 1.0
    spread = z**2 / count
    middle = (share + spread / 2) / (1 + spread)
    reach = math.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    return max(middle - reach, 0.0), min(middle + reach, 1.0)


def folds(y: Labels, groups: Groups, count: int) -> Labels:
    """Divide samples into `count` folds [n], stratified by class, without cutting a group.

    The largest groups of a class come first; each goes to the first of the folds with the fewest samples of that class. So with one
    picture of each class in a fold no class is in the minority among the others: a fold that holds some classes only would make heads look
    worse than they are. With fewer groups of every class than `count` the last folds are empty. A group counts to the class of its first
    sample.
    """
    found = numbers(groups, len(y))
    _, first, sizes = np.unique(found, return_index=True, return_counts=True)
    fold = np.empty(len(first), np.int64)
    for label in np.unique(y[first]):
        members = np.flatnonzero(y[first] == label)
        of_class = np.zeros(count, np.int64)
        for group in members[np.argsort(-sizes[members], kind="stable")]:
            fold[group] = chosen = int(of_class.argmin())
            of_class[chosen] += sizes[group]
    placed: Labels = fold[found]
    return placed


def nearness(sides: NDArray[np.int64]) -> NDArray[np.float32]:
    """Distances [n] of thumbnails up to which pictures are near duplicates, by the shorter sides [n] of the pictures as they were taken."""
    found: NDArray[np.float32] = np.where(sides >= SMALL, NEAR, NEAR_SMALL).astype(np.float32)
    return found


def near_duplicates(thumbs: Thumbnails, near: NDArray[np.float32]) -> Groups:
    """Group pictures by thumbnails [n, SIDE²]: two that are at most `near` [n] apart (both), or equal, and chains of such pairs.

    Sorted along the direction in which the thumbnails differ most, each is compared only with those that can be near: O(n² SIDE²) at
    worst, in matrix products of BLOCK rows, and O(n BLOCK) memory. 10,000 pictures of PACS or Fashion-MNIST take 0.2 to 0.4 s of one core
    of a Xeon.
    """
    if len(thumbs) < 2:
        return alone()
    unique, first, same = np.unique(thumbs, axis=0, return_index=True, return_inverse=True)
    # few pictures are compared with all others, which is faster than finding the direction
    along = np.zeros(len(unique))
    if len(unique) > SORTED_ABOVE:
        u = _unit(unique)
        along = u @ np.linalg.eigh(np.cov(u, rowvar=False))[1][:, -1]
    order = np.argsort(along, kind="stable")
    ordered, along, least = unique[order], along[order], 1 - near[first][order]
    group = np.arange(len(ordered))
    reach = math.sqrt(2 * near.max()) + 1e-4  # |a - b|² = 2 (1 - cosine)
    for start in range(0, len(ordered), BLOCK):
        stop = min(start + BLOCK, len(ordered))
        end = int(np.searchsorted(along, along[stop - 1] + reach, "right"))
        these = _unit(ordered[start:stop])
        is_near = np.concatenate(
            [
                these @ _unit(ordered[at : min(at + BLOCK, end)]).T
                >= np.maximum(least[start:stop, None], least[at : min(at + BLOCK, end)])
                for at in range(start, end, BLOCK)
            ],
            axis=1,
        )
        for row, nears in enumerate(is_near, start):
            others = np.unique(group[start:end][nears])
            if len(others) > 1 or (len(others) and others[0] != group[row]):
                others = np.append(others, group[row])
                group[np.isin(group, others)] = others.min()
    back = np.empty_like(group)
    back[order] = group
    return normal(back[same.reshape(-1)])


def _unit(thumbs: Thumbnails) -> NDArray[np.float32]:
    """Thumbnails [n, SIDE²] without their brightness, of length 1; 0 for noise only, which is near to nothing."""
    u: NDArray[np.float32] = thumbs - thumbs.mean(axis=1, keepdims=True, dtype=np.float32)
    lengths = np.linalg.norm(u, axis=1, keepdims=True)
    u /= np.maximum(lengths, 1e-6)
    u[lengths[:, 0] < FLAT * SIDE] = 0
    return u


def joined(*given: Groups) -> Groups:
    """Join groupings of the same pictures: two in one group by any of them are in one group. -1: known to be in none; empty: all alone."""
    given = tuple(groups for groups in given if len(groups))
    if not given:
        return alone()
    n = len(given[0])
    root = np.arange(n)

    def find(row: int) -> int:
        while root[row] != row:
            root[row] = root[root[row]]
            row = int(root[row])
        return row

    for groups in given:
        first: dict[int, int] = {}
        for row, group in enumerate(groups.tolist()):
            if group >= 0:
                a, b = find(row), find(first.setdefault(group, row))
                root[max(a, b)] = min(a, b)
    return normal(np.array([find(row) for row in range(n)], np.int64))


def single(y: Labels, groups: Groups) -> Labels:
    """Class ids of which there are two or more pictures, all in one group: cross-validation cannot measure them."""
    if are_alone(groups):
        return np.empty(0, np.int64)
    return np.array(
        [
            label
            for label in np.unique(y)
            if (y == label).sum() > 1 and len(np.unique(groups[y == label])) == 1
        ],
        np.int64,
    )


def few(n: int, count: int, samples: str = "pictures") -> str:
    """Return a remark if `count` groups of n `samples` are few and most of these are not alone; "" if not."""
    if not 0 < count < FEW or 2 * count > n:
        return ""
    scenes = "1 scene" if count == 1 else f"{count} scenes"
    return f"{n} {samples} come from {scenes}: the accuracy is an estimate from few scenes"
