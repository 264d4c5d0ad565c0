"""How many samples of a class that a device has no label of are called unknown, at 5 % false unknowns.

    python -m tools.study.unknowns --data .data --out runs/promise      the tables in docs/devices.md, "Unknown pictures"

Every device of `tools.study.promise_cells` with balanced classes loses one class at a time: from its labels and from what its fleet knows.
Half of its test samples are its samples without a label, at most POOL of them; in the other half the lost class shall be found. Rows:

- scores of the literature, each with a threshold from its values of labelled samples without their fold: the distance to the nearest class
  mean (cosine), the Mahalanobis distance to the class means with the covariance of the fleet within classes, the same less that to the
  mean of all ("relative", J. Ren et al., 2021), the nearest labelled sample (cosine), the norm outside the principal subspace of the
  labelled ones (as in ViM, H. Wang et al., CVPR 2022), and minus the log-sum of the logits and the highest probability of the served head;
- what a device does (`edge_fl.heads.unknowns`): without samples without a label; with them; with none of the lost class among them; and if
  only the device lacks the class, while the fleet knows it: then those that are predicted right are never unknown;
- the best there is on these features: a linear classifier that learns the lost class from half of its samples.

The second table is of the classes that the label page suggests (`edge_fl_maker.labelling.immediate.resembling`): how often it suggests one,
how large it is, and how much of it is of the lost class, with the samples without a label and with those of which none are lost.

"best threshold": the share found at the threshold at which 5 % of the known test samples are unknown, which no device knows.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from edge_fl import heads
from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl.data import grouping
from edge_fl.data.samples import Array
from edge_fl.heads import HeadPlan
from edge_fl.heads.auto import Choice
from edge_fl.heads.head import Extras, TrainingSet
from edge_fl.heads.linear import direction
from edge_fl.heads.probability_calibration import FOLDS
from edge_fl_devices.workers.head_fitting import FitData, FitSpec, fit_here
from edge_fl_maker.labelling.immediate import resembling
from tools.study import promise_cells
from tools.study.day_zero_cells import Cell
from tools.study.day_zero_heads import release

FALSE = 0.05
POOL = 300
PER_CLASS = (3, 10, 20)
RIDGE = 1.0
"""Share of the mean variance that is added to every variance of the Mahalanobis distances."""
SUBSPACE = 32
LEAST_TESTS = 2
"""Test samples of the lost class, and of the others, below which a device says nothing of it."""
CEILING_RIDGES = (1e-5, 1e-4, 1e-3, 1e-2)
WITH_POOL = "device, with its unlabelled samples"
BEST, KNOWN_TO_FLEET = "knows the class", "device, the fleet knows the class"
Score = Callable[[Array], Array]
"""Directions [n, d] -> values [n], higher ones of unknown samples."""


class Found(NamedTuple):
    """Shares of one device: known samples that are called unknown, and unknown ones; the same at the best threshold."""

    false: float
    found: float
    best: float


class Suggested(NamedTuple):
    """The largest group of unknown samples without a label that resemble each other: its size, 0 if there is none, and the share lost."""

    size: int
    lost: float


class Case(NamedTuple):
    """A device without one class: features and labels, those without a label, and the tests, of which `lost` [t] are of the class.

    lost_pool bool [p]: which of those without a label are of the class. pool_without: samples without a label of which none are.
    whitening [d, d]: makes the fleet's covariance within classes that of a sphere.
    """

    label: int
    z: Array
    y: Array
    pool: Array
    lost_pool: Array
    pool_without: Array
    tests: Array
    lost: Array
    whitening: Array


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tools.study.unknowns", None, __doc__, formatter_class=formatter
    )
    parser.add_argument("--data", type=Path, default=Path(".data"), help="folder of the data sets [.data]")
    parser.add_argument("--out", type=Path, default=Path("runs/promise"), help="folder of the cells")
    parser.add_argument("--sets", default=f"{promise_cells.PACS},{promise_cells.CIFAR},{promise_cells.IMU}")
    parser.add_argument("--devices", type=int, default=2, help="of each cell [2]")
    parser.add_argument("--cells", type=int, default=10, help="of each data set, the first ones [10]")
    options = parser.parse_args(arguments)
    for name in options.sets.split(","):
        found = defaultdict[tuple[int, str], list[Found]](list)
        groups = defaultdict[tuple[int, str], list[Suggested]](list)
        for cell in islice(promise_cells.cells([name], options.data, options.out), options.cells):
            with threadpool_limits(1):
                for key, each in of_cell(cell, options.devices):
                    if isinstance(each, Suggested):
                        groups[key].append(each)
                    else:
                        found[key].append(each)
        for shown in (table(name, found), suggestion_table(name, groups)):
            sys.stdout.write(tables.markdown(shown) + "\n")
        sys.stdout.flush()


def of_cell(cell: Cell, devices: int) -> Iterator[tuple[tuple[int, str], Found | Suggested]]:
    """Yield (labels per class, row) and what was found, for the first balanced devices and each class."""
    kinds = [number for number, kind in enumerate(cell.about.rows) if kind == promise_cells.BALANCED]
    knowing = release(cell)
    for label in range(cell.about.classes):
        without = _without(cell, label)
        lacking, whitening = release(without), whitened(without)
        for device in kinds[:devices]:
            for count in PER_CLASS:
                case = case_of(cell, device, label, count, whitening)
                if min(case.lost.sum(), (~case.lost).sum()) >= LEAST_TESTS and len(np.unique(case.y)) > 1:
                    for row, score in scores(case).items():
                        yield (count, row), of_score(score, case)
                    for row, found in served(cell, case, knowing, lacking).items():
                        yield (count, row), found
                    yield (count, BEST), supervised(case)


def case_of(cell: Cell, device: int, label: int, count: int, whitening: Array) -> Case:
    """The device without a class, with `count` labels of each other class."""
    rows = cell.labels(device)[: count * cell.about.classes]
    rows = rows[cell.y[rows] != label]
    rest = np.random.default_rng([device, label]).permutation(cell.tests(device))
    mine, tests = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    z, lost = cell.z, cell.y == label
    without = mine[~lost[mine]][:POOL]
    return Case(
        label,
        z[rows],
        cell.y[rows],
        z[mine[:POOL]],
        lost[mine[:POOL]],
        z[without],
        z[tests],
        lost[tests],
        whitening,
    )


def _without(cell: Cell, label: int) -> Cell:
    """The same, whose fleet has no samples of a class."""
    kept, others = cell.fleet_y != label, np.arange(cell.about.classes) != label
    fleet = {f"fleet_{name}": getattr(cell, f"fleet_{name}")[kept] for name in ("z", "y", "device")}
    return replace(cell, **fleet, counts=cell.counts * others)


def whitened(cell: Cell) -> Array:
    """A matrix [d, d] by which the fleet's covariance within classes of directions, plus RIDGE, becomes the identity."""
    u, parts = direction(cell.fleet_z), list[Array]()
    for device in np.unique(cell.fleet_device):
        for label in np.unique(cell.fleet_y):
            rows = (cell.fleet_device == device) & (cell.fleet_y == label)
            if rows.any():
                parts.append(u[rows] - u[rows].mean(axis=0))
    x = np.concatenate(parts).astype(np.float64)
    covariance = x.T @ x / len(x)
    ridge = RIDGE * np.trace(covariance) / len(covariance)
    return np.linalg.inv(np.linalg.cholesky(covariance + ridge * np.eye(len(covariance)))).T


def scores(case: Case) -> dict[str, Callable[[Array, Array], Score]]:
    """Scores of the literature: each is fitted to directions [n, d] and class ids [n], and gives higher values to unknown ones."""

    def cosine(u: Array, y: Array) -> Score:
        means = _unit(_means(u, y))
        return lambda v: -(v @ means.T).max(axis=1)

    def mahalanobis(u: Array, y: Array) -> Score:
        means = _means(u, y) @ case.whitening
        return lambda v: _squares(v @ case.whitening, means).min(axis=1)

    def relative(u: Array, y: Array) -> Score:
        near, centre = mahalanobis(u, y), _means(u, y).mean(axis=0, keepdims=True) @ case.whitening
        return lambda v: near(v) - _squares(v @ case.whitening, centre)[:, 0]

    def nearest(u: Array, y: Array) -> Score:
        centre = _means(u, y).mean(axis=0)
        known = _unit(u - centre)
        return lambda v: -(_unit(v - centre) @ known.T).max(axis=1)

    def residual(u: Array, y: Array) -> Score:
        centre = _means(u, y).mean(axis=0)
        basis = np.linalg.svd(u - centre, full_matrices=False)[2][:SUBSPACE].T
        return lambda v: np.linalg.norm((v - centre) - (v - centre) @ basis @ basis.T, axis=1)

    return {
        "class means, cosine": cosine,
        "Mahalanobis, fleet's covariance": mahalanobis,
        "relative Mahalanobis": relative,
        "nearest labelled, cosine": nearest,
        "outside the subspace (ViM)": residual,
    }


def of_score(score: Callable[[Array, Array], Score], case: Case) -> Found:
    """What a score finds, with the threshold from the labelled samples without their fold."""
    u = direction(case.z).astype(np.float64)
    fold, own = grouping.folds(case.y, grouping.numbers(grouping.alone(), len(u)), FOLDS), np.empty(len(u))
    for number in np.unique(fold):
        out = fold == number
        own[out] = score(u[~out], case.y[~out])(u[out])
    tests = score(u, case.y)(direction(case.tests).astype(np.float64))
    return of_values(own, tests, case.lost)


def of_values(own: Array, tests: Array, lost: Array) -> Found:
    """Found at the conformal threshold of the labelled samples' values [n]; none is unknown if these are too few."""
    unknown = (1 + (own[None] >= tests[:, None]).sum(axis=1)) / (len(own) + 1) <= FALSE
    return _found(unknown, tests, lost)


def _found(unknown: Array, values: Array, lost: Array) -> Found:
    best = values[lost] > np.quantile(values[~lost], 1 - FALSE)
    return Found(float(unknown[~lost].mean()), float(unknown[lost].mean()), float(best.mean()))


def served(
    cell: Cell, case: Case, knowing: tuple[HeadPlan, Extras], lacking: tuple[HeadPlan, Extras]
) -> dict[str, Found | Suggested]:
    """What a device finds, as it fits: with and without samples without a label, and where the fleet knows the class."""
    cases = {
        "device": (lacking, None),
        WITH_POOL: (lacking, case.pool),
        "device, none of the class among them": (lacking, case.pool_without),
        KNOWN_TO_FLEET: (knowing, case.pool),
    }
    found = dict[str, Found | Suggested]()
    for row, ((plan, extras), pool) in cases.items():
        about = cell.about
        spec = FitSpec("logistic", about.classes, about.unit_norm, "", plan=plan, calibrate=True)
        choice = fit_here(spec, FitData(case.z, case.y, extras, unlabelled=pool))
        logits = choice.head.logits(case.tests)
        distances = choice.calibration.percentiles(case.tests, logits.argmax(axis=1))
        values = choice.calibration.known.distances(case.tests)
        found[row] = _found(distances > 1 - FALSE, values, case.lost)
        if pool is case.pool_without:
            found["none of the lost class"] = suggested(choice, pool, np.zeros(len(pool), bool))
        if row == WITH_POOL:
            found["with the lost class"] = suggested(choice, case.pool, case.lost_pool)
        if row == KNOWN_TO_FLEET:
            right = logits.argmax(axis=1) == case.label
            found["the same: predicted right"] = Found(np.nan, float(right[case.lost].mean()), np.nan)
        if pool is None:
            estimate = heads.estimated("logistic", _training(cell, case, plan, extras))
            for name, score in (("energy of the head", _energy), ("probability of the head", _unlikely)):
                found[name] = of_values(score(estimate.logits), score(logits), case.lost)
    return found


def suggested(choice: Choice, pool: Array, lost: Array) -> Suggested:
    """What the label page suggests first of features [p, d], of which `lost` [p] are of the lost class."""
    predicted = choice.head.logits(pool).argmax(axis=1)
    unknown = np.flatnonzero(choice.calibration.percentiles(pool, predicted) > 1 - FALSE)
    if not choice.calibration.are_more(len(unknown), len(pool), FALSE):
        return Suggested(0, np.nan)
    groups = resembling(pool[unknown], choice.calibration.known, grouping.alone())
    return (
        Suggested(len(groups[0]), float(lost[unknown[groups[0]]].mean())) if groups else Suggested(0, np.nan)
    )


def _training(cell: Cell, case: Case, plan: HeadPlan, extras: Extras) -> TrainingSet:
    about = cell.about
    return heads.training_set(case.z, case.y, about.classes, about.unit_norm, plan=plan, extras=extras)


def supervised(case: Case) -> Found:
    """What a linear classifier finds that learns the class from half of the tests; the best of several ridges."""
    u, half = direction(case.tests).astype(np.float64), np.zeros(len(case.tests), bool)
    half[np.argsort(case.lost, kind="stable")[::2]] = True
    labelled = direction(case.z).astype(np.float64)
    x = np.concatenate([labelled, u[half]])
    target = np.concatenate([np.zeros(len(labelled)), case.lost[half]])
    weights = np.where(target == 1, 0.5 / target.sum(), 0.5 / (1 - target).sum())
    centred = x - weights @ x
    products, towards = centred.T * weights @ centred, centred.T @ (weights * (target - 0.5))
    found = list[Found]()
    for ridge in CEILING_RIDGES:
        values = u[~half] @ np.linalg.solve(products + ridge * np.eye(len(products)), towards)
        found.append(_found(values > np.inf, values, case.lost[~half]))
    best = max(each.best for each in found)
    return Found(FALSE, best, best)


def table(name: str, found: dict[tuple[int, str], list[Found]]) -> Table:
    """Means over devices and classes, the worst device, and the 95 % interval of the share that is found."""
    lines = []
    for (count, row), each in sorted(found.items(), key=lambda item: item[0][0]):
        false, share, best = (np.array(values) for values in zip(*each, strict=True))
        reach = 1.96 * share.std() / np.sqrt(len(share))
        lines.append(
            [
                str(count),
                row,
                str(len(each)),
                _percent(false.mean(), 1),
                _percent(false.max()),
                f"{share.mean():.0%} ± {100 * reach:.0f}",
                _percent(best.mean()),
            ]
        )
    headings = [
        "labels per class",
        "row",
        "n",
        "false unknowns",
        "worst device",
        "found",
        "at the best threshold",
    ]
    note = (
        f"n: devices times classes left out. False unknowns aimed at: {FALSE:.0%}. ±: 95 % interval over n."
    )
    return Table(headings, lines, f"Unknown classes, {name}", [note])


def suggestion_table(name: str, found: dict[tuple[int, str], list[Suggested]]) -> Table:
    """How often a class is suggested, and what the first suggestion holds."""
    lines = []
    for (count, row), each in sorted(found.items(), key=lambda item: item[0][0]):
        shown = [one for one in each if one.size]
        if not shown:
            continue
        sizes, lost = [one.size for one in shown], np.array([one.lost for one in shown])
        lines.append(
            [
                str(count),
                row,
                str(len(each)),
                f"{len(shown) / len(each):.0%}",
                f"{np.median(sizes):.0f}",
                f"{lost.mean():.0%}",
                f"{(lost > 0.5).mean():.0%}",
            ]
        )
    headings = [
        "labels per class",
        "unlabelled samples",
        "n",
        "suggested",
        "samples (median)",
        "lost",
        "mostly lost",
    ]
    note = "n: devices times classes left out. Lost: mean share of a suggestion; mostly lost: share of suggestions with more than half."
    return Table(headings, lines, f"Suggested classes, {name}", [note])


def _percent(share: float, digits: int = 0) -> str:
    return "" if np.isnan(share) else f"{share:.{digits}%}"


def _energy(logits: Array) -> Array:
    return -np.asarray(logsumexp(logits, axis=1))


def _unlikely(logits: Array) -> Array:
    return np.asarray(-np.exp(logits.max(axis=1) - logsumexp(logits, axis=1)))


def _means(u: Array, y: Array) -> Array:
    return np.stack([u[y == label].mean(axis=0) for label in np.unique(y)])


def _unit(rows: Array) -> Array:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))


def _squares(v: Array, means: Array) -> Array:
    """Squared distances [n, k] of rows [n, d] from means [k, d]."""
    return np.asarray(np.square(v).sum(axis=1)[:, None] - 2 * v @ means.T + np.square(means).sum(axis=1))


if __name__ == "__main__":
    main()
