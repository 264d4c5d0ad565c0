"""Whether prediction sets keep their promise on every device, how large they are, and how much is answered.

python -m tools.study.promise --data .data                   PACS, CIFAR-10 and exercises; half an hour, mostly for the cells
python -m tools.study.promise --datasets cifar10             one of them; finished cells are kept in --out

Devices are those of tools/study/promise_cells.py. Each fits its head with 0, 3, 10 and 20 labels per class; its fleet's survivals come
from the other devices, of PACS of other domains, of exercises of other persons. 200 samples without a label are known to the device.

Next to the product's sets are those of published ways to share scores between devices, on the probabilities that a device shows:

- own: a device's own held-out scores alone (split conformal prediction)
- pooled: one quantile of all devices' scores (C. Lu et al., ICML 2023)
- quantile of quantiles: the median of the devices' quantiles (P. Humbert et al., ICML 2023)
- weighted quantiles: their mean, weighted by labels (FedWQ-CP, arXiv:2602.23296)
- by class: a quantile for each class (groups of GC-FCP, arXiv:2603.14198)
- by class shares: others' scores weighted by the device's class shares (weights of PFWCP, arXiv:2606.00717)

All sets have the most probable class, as the product's do. "Before" is the threshold of a target precision that the promise has replaced.
"""

import argparse
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from edge_fl import heads
from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl.data.samples import Array, Labels
from edge_fl.heads import probability_calibration, training_set
from edge_fl.heads import promise as promises
from edge_fl.heads.descent import probabilities
from tools.study import day_zero_heads, promise_cells
from tools.study.promise_cells import CIFAR, IMU, PACS, PER_CLASS, Shared

TARGET, ANSWERED = 0.9, 0.95
UNLABELLED = 200
LEAST_BEFORE, LEAST_ANSWERED = 20, 5
"""Of the threshold before: held-out predictions for having one, and answered ones."""
HELPFUL = 0.89
"""Mean coverage below which a published way does not count as the best: its sets are small because they miss."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """One device with so many labels: held-out logits of its labels y and fleet's logits; logits of its tests, their labels and weights."""

    cell: int
    device: int
    kind: str
    per_class: int
    held: Array
    fleet: Array
    y: Labels
    unlabelled: Array
    temperature: float
    tests: Array
    truth: Labels
    weights: Array

    @property
    def scores(self) -> Array:
        """1 - p(label) [n] of the held-out predictions, with the shown probabilities."""
        return 1 - self.shown(self.held)[np.arange(len(self.y)), self.y]

    def shown(self, logits: Array) -> Array:
        """Probabilities as they are shown."""
        return np.asarray(probabilities(logits / np.float32(self.temperature)))

    def survivals(self) -> Array:
        """Of the head with labels, or for a device without of the fleet's head."""
        return promises.survivals(self.held if self.per_class else self.fleet, self.y)

    def covered(self, sets: Array) -> tuple[float, float]:
        """Coverage and mean size of sets [n, C] of the tests."""
        inside = sets[np.arange(len(sets)), self.truth]
        return float(inside @ self.weights), float(sets.sum(axis=1) @ self.weights)

    def answers(self, answered: Array) -> tuple[float, float]:
        """Share of tests that are answered, and that of them that is right; NaN without any."""
        share = float(answered @ self.weights)
        right = self.tests.argmax(axis=1) == self.truth
        return share, float((answered & right) @ self.weights) / share if share else np.nan

    def below(self, threshold: float | Array) -> Array:
        """Sets [n, C] of all classes with 1 - p of at most `threshold`, and the most probable one."""
        p = self.shown(self.tests)
        return np.asarray((1 - p <= threshold) | (p == p.max(axis=1, keepdims=True)))


def fits(name: str, data: Path, out: Path) -> Iterator[Fitted]:
    """Every device of a data set with each number of labels."""
    for place, cell in enumerate(promise_cells.cells([name], data, out)):
        with threadpool_limits(1):
            for device in range(len(cell.about.rows)):
                for per_class in PER_CLASS:
                    yield fit(cell, place, device, per_class)


def fit(cell: Shared, place: int, device: int, per_class: int) -> Fitted:
    """Fit one head. Without labels, the fleet's predictions of 10 labels per class stand for those of other devices."""
    about, tests = cell.about, cell.tests(device)
    plan, extras = day_zero_heads.release(cell)
    rows = cell.labels(device)[: per_class * about.classes]

    def given(rows: Array) -> heads.TrainingSet:
        return training_set(
            cell.z[rows], cell.y[rows], about.classes, about.unit_norm, plan=plan, extras=extras
        )

    trained = given(rows)
    found = heads.estimated("logistic", trained)
    temperature = probability_calibration.of_estimate(found, trained).temperature
    held, y = found.logits.astype(np.float32), trained.y[found.rows]
    if not per_class:
        others = given(cell.labels(device)[: 10 * about.classes])
        held, y = held[:0], others.y
    fleet = found.head.logits(others.z) if not per_class else held[:0]
    rng, weights = np.random.default_rng([place, device]), cell.weights(device)
    logits = found.head.logits(cell.z[tests])
    some = rng.choice(len(tests), min(UNLABELLED, len(tests)), p=weights)
    return Fitted(
        place, device, about.rows[device], per_class, held, fleet, y, logits[some], temperature, logits,
        cell.y[tests], weights,
    )  # fmt: skip


def others(name: str, own: Fitted, every: Sequence[Fitted]) -> list[Fitted]:
    """The other devices of a device's fleet."""
    if name == CIFAR:
        return [each for each in every if each.cell == own.cell and each.device != own.device]
    group = 10 if name == IMU else len(every)  # a person has a cell for each seed
    return [each for each in every if each.cell % group != own.cell % group]


def product(own: Fitted, fleet: Sequence[Fitted]) -> promises.Promise:
    """The device's limits, as it makes them."""
    histogram = np.sum([promises.histogram(each.survivals()) for each in fleet], axis=0)
    labels = own.y if own.per_class else own.y[:0]
    return promises.of(own.held, labels, np.ones(len(labels)), own.unlabelled, fleet=histogram)


def quantile(scores: Array, weights: Array | None = None) -> float:
    """The score that a share TARGET of all and one more infinite score is below."""
    counted = np.ones(len(scores)) if weights is None else weights
    order = np.argsort(scores)
    shares = np.cumsum(counted[order]) / (counted.sum() + 1)
    place = int(np.searchsorted(shares, TARGET - 1e-9))
    return float(scores[order][place]) if place < len(scores) else 1.0


def by_class(own: Fitted, fleet: Sequence[Fitted]) -> Array:
    """A quantile for each class [C]."""
    scores, y = _pooled([*fleet, own])
    return np.array([quantile(scores[y == label]) for label in range(own.tests.shape[1])])


def by_shares(own: Fitted, fleet: Sequence[Fitted]) -> float:
    """The quantile of all scores, those of others weighted by how frequent their class is on the device."""
    (scores, y), classes = _pooled(fleet), own.tests.shape[1]
    mine, theirs = (np.bincount(labels, minlength=classes) + 1.0 for labels in (own.y, y))
    ratio = (mine / mine.sum()) / (theirs / theirs.sum())
    return quantile(np.append(scores, own.scores), np.append(ratio[y], np.ones(len(own.y))))


def _pooled(fleet: Sequence[Fitted]) -> tuple[Array, Labels]:
    return np.concatenate([each.scores for each in fleet]), np.concatenate([each.y for each in fleet])


def _quantiles(own: Fitted, fleet: Sequence[Fitted]) -> tuple[Array, Array]:
    every = [*fleet, own]
    return np.array([quantile(each.scores) for each in every]), np.array([len(each.y) for each in every])


WAYS: Mapping[str, Callable[[Fitted, Sequence[Fitted]], float | Array]] = {
    "own": lambda own, fleet: quantile(own.scores),
    "pooled": lambda own, fleet: quantile(_pooled([*fleet, own])[0]),
    "quantile of quantiles": lambda own, fleet: float(np.median(_quantiles(own, fleet)[0])),
    "weighted quantiles": lambda own, fleet: float(np.average(_quantiles(own, fleet)[0], weights=_quantiles(own, fleet)[1])),
    "by class": by_class,
    "by class shares": by_shares,
}  # fmt: skip


def before(own: Fitted) -> Array:
    """Which tests the threshold of a target precision answers: held-out predictions above it reach it, as seen and as expected."""
    if not own.per_class or len(own.y) < LEAST_BEFORE:
        return np.zeros(len(own.tests), np.bool_)
    p = own.shown(own.held)
    sure, right = p.max(axis=1), p.argmax(axis=1) == own.y
    order = np.argsort(-sure)
    numbers = np.arange(1, len(order) + 1)
    precision = np.minimum(np.cumsum(right[order]), np.cumsum(sure[order])) / numbers
    reached = np.flatnonzero((precision >= ANSWERED) & (numbers >= LEAST_ANSWERED))
    least = sure[order][reached[-1]] if len(reached) else np.inf
    return np.asarray(own.shown(own.tests).max(axis=1) >= least)


def lines(name: str, every: Iterable[Fitted]) -> Iterator[list[str]]:
    """The table's rows of one data set."""
    groups = defaultdict[tuple[str, int], list[Fitted]](list)
    for each in every:
        groups[each.kind, each.per_class].append(each)
    for (kind, per_class), devices in groups.items():
        ours, answers, earlier = (
            list[tuple[float, float]](),
            list[tuple[float, float]](),
            list[tuple[float, float]](),
        )
        published = defaultdict[str, list[tuple[float, float]]](list)
        for own in devices:
            fleet = others(name, own, devices)
            found = product(own, fleet)
            ours.append(own.covered(found.sets(own.tests, TARGET)))
            answers.append(own.answers(found.sets(own.tests, ANSWERED).sum(axis=1) == 1))
            earlier.append(own.answers(before(own)))
            for way, threshold in WAYS.items() if per_class else ():
                published[way].append(own.covered(own.below(threshold(own, fleet))))
        right = np.mean([own.answers(np.ones(len(own.truth), np.bool_))[1] for own in devices])
        yield [
            name, kind, str(per_class), str(len(devices)), f"{right:.3f}", *_coverage(ours),
            *_best(published), _answers(answers), _answers(earlier),
        ]  # fmt: skip


def _coverage(found: Sequence[tuple[float, float]]) -> list[str]:
    coverage, sizes = np.array(found).T
    return [f"{coverage.mean():.3f}", f"{coverage.min():.3f}", f"{sizes.mean():.2f}"]


def _best(published: Mapping[str, list[tuple[float, float]]]) -> list[str]:
    """The published way with the smallest sets, of those that help, and the one with the best worst device."""
    if not published:
        return ["-", "-"]
    helpful = {way: found for way, found in published.items() if np.array(found)[:, 0].mean() >= HELPFUL}
    small = min(helpful or published, key=lambda way: float(np.array(published[way])[:, 1].mean()))
    safe = max(published, key=lambda way: float(np.array(published[way])[:, 0].min()))
    return [f"{way}: {', '.join(_coverage(published[way]))}" for way in (small, safe)]


def _answers(found: Sequence[tuple[float, float]]) -> str:
    shares, right = np.array(found).T
    if not shares.any():
        return "none"
    return f"{100 * shares.mean():.0f} %, {np.nanmean(right):.3f}, {np.nanmin(right):.3f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit what is missing, and print the table."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tools.study.promise", None, __doc__, formatter_class=formatter
    )
    parser.add_argument("--data", type=Path, default=Path(".data"), help="folder of the .npz files [.data]")
    parser.add_argument("--out", type=Path, default=Path("runs/promise"), help="folder of the stored cells")
    parser.add_argument("--datasets", default=",".join((PACS, CIFAR, IMU)), help="comma-separated")
    options = parser.parse_args(arguments)
    rows = [
        row
        for name in options.datasets.split(",")
        for row in lines(name, fits(name, options.data, options.out))
    ]
    headings = [
        "data set",
        "devices",
        "labels per class",
        "n",
        "accuracy",
        "coverage",
        "worst device",
        "size",
    ]
    headings += ["smallest published", "safest published", "answered", "before"]
    notes = [
        f"Promise {TARGET:g}: mean coverage over n devices, that of the worst one, and mean classes in a set; of published ways the one"
        f" with the smallest sets (and a mean coverage of {HELPFUL:g} or more, if any) and the one with the best worst device.",
        f"Answered at promise {ANSWERED:g}: share, and how many of these are right on average and on the worst device; before: with a"
        " threshold for that precision.",
    ]
    title = "Prediction sets on unseen samples"
    sys.stdout.write(tables.markdown(Table(headings, rows, title, notes, headings[2:])) + "\n")


if __name__ == "__main__":
    logging.getLogger("edge_fl_server").setLevel(logging.ERROR)
    main()
