"""Labels to look at: probably wrong ones, near duplicates in two classes, what a confusion comes from, and classes with few labels.

What is predicted of a sample without its fold are the served head, the candidates from own labels alone and the fleet's head
(`edge_fl.heads.served.Estimate`). They are pooled, with exponents a that need not add up to 1, because heads may be too sure or not sure
enough. T are the probabilities of a label by the true class:

    p(c) ∝ Π_k p_k(c)^a_k        P(true class c) ∝ p(c) T(c, y)        P(wrong) = 1 - P(true class y)

First T is the same for all classes, 1 - ε for the class itself and ε / (C - 1) for each other one; ε and a are the most probable ones given
the labels, with the priors ε ~ Beta(SHARE) and log a ~ N(log 1/K, 1) for K heads. Then T follows by expectation maximisation, with TRUST
labels of each class that have this ε: if many labels of one class are another one, T says so. So no clean label is needed. A label counts 1
over the size of its group.

The list has the length of the highest expected F1, 2 Σ P / (length + Σ P over all labels). Without a fleet's head only own labels speak.

Sources: logarithmic pool, C. Genest and J. Zidek, Statistical Science 1986; label noise by class, A. Dawid and A. Skene,
Applied Statistics 1979; expected F1, Z. Lipton et al., ECML 2014. Measured by `python -m tools.study.wrong_labels`,
docs/teach-a-device.md has figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from edge_fl.data import grouping
from edge_fl.data.grouping import Groups
from edge_fl.heads import served
from edge_fl.heads.head import TrainingSet
from edge_fl.heads.linear import Doubles
from edge_fl.heads.served import Estimate, Rows

SHARE = (1.0, 19.0)
"""Wrong and right labels that are assumed besides those of the device: 5 % wrong."""
TRUST, STEPS = 20.0, 30
"""Labels of each class that are assumed for T, and steps of expectation maximisation."""
LEAST = 0.1
"""P(wrong) below which a label is never listed, nor named for a confusion."""
LOWEST = -50.0
"""Logarithm of the least probability that a head gives a class."""
PART = 300
"""Samples that are examined at a time, so that the time of many labels grows with their number."""
CONFUSED = (3, 0.2)
"""Labels of a class, and share of its labels, that must be one other class to the head for a confusion."""
CULPRITS = 3
"""Labels that are named for a confusion."""
FEW, LEAST_EXPECTED = 4, 8
"""A class has few labels with less than a FEWth of what is expected, if that is LEAST_EXPECTED or more."""


@dataclass(frozen=True, eq=False)
class Doubts:
    """Of each label: P(wrong) [n], and the class `likely` [n] that it then most probably is.

    own, fleet [n]: what the other own labels alone and the fleet's head call it, -1 where they do not.
    """

    wrong: Doubles
    likely: Rows
    own: Rows
    fleet: Rows

    @classmethod
    def none(cls, y: Rows) -> Doubts:
        """No doubt about the labels y [n]."""
        nothing = np.full(len(y), -1)
        return cls(np.zeros(len(y)), y.copy(), nothing, nothing.copy())


class Confusion(NamedTuple):
    """`mistaken` of the `labels` labels of class `first` are class `second` to the other own labels.

    culprits: labels of `second`, at most CULPRITS, that are rather `first`, the most probable ones first.
    """

    first: int
    second: int
    mistaken: int
    labels: int
    culprits: Rows

    def words(self, names: Sequence[str], classes: Sequence[str]) -> str:
        """Like "leaf is often apple: 5 of 20 labels by the others; look at apple/7.png"."""
        line = f"{classes[self.first]} is often {classes[self.second]}: {self.mistaken} of {self.labels} labels by the others"
        culprits = ", ".join(names[file] for file in self.culprits)
        return f"{line}; look at {culprits}" if culprits else line


class LabelToLookAt(Struct, frozen=True):
    """A label of a file, by its number, that is rather `likely`, a class id; why, in words."""

    file: int
    likely: int
    why: str


class Examination(Struct, frozen=True):
    """Labels to look at, the most probably wrong ones first, remarks on classes, how many files were examined, and the share that is
    wrong, 0..1, as it is estimated.
    """

    labels: list[LabelToLookAt]
    remarks: list[str]
    files: int
    share: float

    @property
    def words(self) -> str:
        """Like "6 of 140 labels to look at; about 4 % are wrong, estimated from the labels themselves"."""
        if not self.files:
            return "no labels to examine"
        part = f"about {100 * self.share:.0f} %" if self.share >= 0.01 else "less than 1 %"
        rest = f"; {part} are wrong, estimated from the labels themselves"
        few = f" (few labels: {self.files})" if self.files < grouping.FEW else ""
        return f"{len(self.labels)} of {self.files} labels to look at{few}{rest}"


def examine(
    data: TrainingSet, files: Rows, names: Sequence[str], classes: Sequence[str], duplicates: Groups
) -> Examination:
    """Examine labelled samples, which belong to `files` [n], numbered from 0, with these `names`; the samples of a file have one label.

    duplicates [n]: which samples are nearly the same picture, empty if none are. Raises ArtefactError for extras that do not fit.
    """
    if not len(files):
        return Examination([], [], 0, 0.0)
    first = np.unique(files, return_index=True)[1]
    y = data.y[first]
    found = of_files(data, files)
    pairs = {} if not len(duplicates) else _in_two_classes(y, duplicates[first], found.wrong)
    doubted = [file for file in listed(found.wrong) if file not in pairs]
    labels = [
        *(
            LabelToLookAt(
                file,
                int(y[other]),
                f"nearly the same picture as {names[other]}, which is labelled {classes[y[other]]}",
            )
            for file, other in pairs.items()
        ),
        *(
            LabelToLookAt(int(file), int(found.likely[file]), _why(found, int(file), classes))
            for file in doubted
        ),
    ]
    confused = (each.words(names, classes) for each in confusions(y, found, len(classes)))
    remarks = [*confused, *few(data, y, classes)]
    return Examination(labels, remarks, len(y), float(found.wrong.mean()))


def of_files(data: TrainingSet, files: Rows) -> Doubts:
    """Doubts about the labels of `files` [n], PART samples at a time, each with as many of every class as possible."""
    groups = grouping.joined(grouping.numbers(data.groups, len(files)), files)
    scenes = grouping.numbers(groups, len(files))
    count = -(-len(files) // PART)
    part = grouping.folds(data.y, scenes, count) if count > 1 else np.zeros(len(files), np.int64)
    found = Doubts.none(data.y[np.unique(files, return_index=True)[1]])
    for number in np.unique(part):
        rows = np.flatnonzero(part == number)
        if len(np.unique(data.y[rows])) < 2 and not data.plan.fleet:
            continue
        taken = replace(data, z=data.z[rows], y=data.y[rows], groups=scenes[rows], importance=np.empty(0))
        estimate = served.fit(taken)
        at = rows[estimate.rows]
        one = doubts(estimate, data.y[at], scenes[at], files[at])
        which = np.unique(files[at])
        for name in ("wrong", "likely", "own", "fleet"):
            getattr(found, name)[which] = getattr(one, name)
    return found


def doubts(estimate: Estimate, y: Rows, groups: Groups, files: Rows | None = None) -> Doubts:
    """Doubts about the labels y [m] of the samples of `estimate`, in these groups [m], by file (None: each sample is one)."""
    heads = [estimate.logits, estimate.own, estimate.fleet] if estimate.fleet is not None else [estimate.own]
    _, first, of_file = np.unique(
        np.arange(len(y)) if files is None else files, return_index=True, return_inverse=True
    )
    parts = [_by_file(_log_shares(each), of_file) for each in heads if each is not None]
    labels, scenes = y[first], groups[first] if len(groups) else groups
    weights = grouping.weights(scenes, len(labels))
    pooled, share = _pooled(parts, labels, weights)
    true = _true_classes(np.exp(pooled), labels, share, weights)
    rows = np.arange(len(labels))
    wrong = 1 - true[rows, labels]
    true[rows, labels] = -1
    calls = [each.argmax(axis=1) for each in parts]
    own, fleet = (calls[1], calls[2]) if len(calls) > 1 else (calls[0], np.full(len(labels), -1))
    return Doubts(wrong, true.argmax(axis=1), own, fleet)


def listed(wrong: Doubles) -> Rows:
    """The places of the labels to look at, most probably wrong first, by P(wrong) [n]."""
    order = np.argsort(-wrong, kind="stable")
    expected = np.cumsum(wrong[order]) / (np.arange(1, len(wrong) + 1) + wrong.sum())
    found: Rows = order[: int(expected.argmax()) + 1 if len(wrong) else 0]
    return found[wrong[found] >= LEAST]


def confusions(y: Rows, found: Doubts, classes: int) -> Iterator[Confusion]:
    """Two classes of which the first is often the second to the other own labels, for labels y [n] by file."""
    calls = np.where(found.own >= 0, found.own, y)
    counts = np.bincount(y * classes + calls, minlength=classes * classes).reshape(classes, classes)
    for first, second in np.argwhere(counts >= CONFUSED[0]).tolist():
        mistaken, count = int(counts[first, second]), int(counts[first].sum())
        if first == second or mistaken < CONFUSED[1] * count:
            continue
        rather = np.flatnonzero((y == second) & (found.likely == first) & (found.wrong >= LEAST))
        order = np.argsort(-found.wrong[rather], kind="stable")
        yield Confusion(first, second, mistaken, count, rather[order[:CULPRITS]])


def few(data: TrainingSet, y: Rows, classes: Sequence[str]) -> Iterator[str]:
    """A line for each class with far fewer labels than the median class, or than its share of the fleet's data; y [n] is by file."""
    counts = np.bincount(y, minlength=len(classes))
    usual = float(np.median(counts[counts > 0])) if len(y) else 0.0
    shares = np.asarray(data.plan.shares, np.float64)
    shares = np.pad(shares / max(shares.sum(), 1e-12), (0, max(0, len(classes) - len(shares))))
    for label, count in enumerate(counts):
        expected = shares[label] * len(y)
        if count and usual >= LEAST_EXPECTED and FEW * count < usual:
            yield f"{classes[label]} has {count} labels, half of the classes have {usual:g} or more: label more of it"
        elif expected >= LEAST_EXPECTED and FEW * count < expected:
            yield (
                f"{classes[label]} has {count} of {len(y)} labels, but {100 * shares[label]:.0f} % of the fleet's data:"
                " label more of it, unless it is rare here"
            )


def _why(found: Doubts, file: int, classes: Sequence[str]) -> str:
    """Why a label is listed, and how probably it is wrong."""
    own, fleet = int(found.own[file]), int(found.fleet[file])
    said = [f"the other labels say {classes[own]}"] * (own >= 0)
    if fleet >= 0:
        said.append(f"the fleet's head says {classes[fleet]}")
    if own == fleet and own >= 0:
        said = [f"the other labels and the fleet's head say {classes[own]}"]
    return f"{', '.join(said)}; wrong with a probability of about {100 * found.wrong[file]:.0f} %"


def _in_two_classes(y: Rows, duplicates: Groups, wrong: Doubles) -> dict[int, int]:
    """Of near duplicates in two classes, one of each pair to look at, with the other: those of the rarer class, then the likelier wrong."""
    found = dict[int, int]()
    for group in np.flatnonzero(np.bincount(duplicates) > 1):
        members = np.flatnonzero(duplicates == group)
        counts = np.bincount(y[members], minlength=int(y.max()) + 1)
        best = max(members, key=lambda file: (counts[y[file]], -wrong[file], -file))
        found |= {int(file): int(best) for file in members if y[file] != y[best]}
    return found


def _true_classes(pooled: Doubles, y: Rows, share: float, weights: Doubles) -> Doubles:
    """P(true class) [m, C] by the pooled probabilities [m, C], with T by expectation maximisation."""
    classes = pooled.shape[1]
    start = np.full((classes, classes), share / max(classes - 1, 1))
    np.fill_diagonal(start, 1 - share)
    labels = np.eye(classes)[y] * weights[:, None]
    given = start
    for _ in range(STEPS):
        true = pooled * given[:, y].T
        true /= np.maximum(true.sum(axis=1, keepdims=True), 1e-300)
        given = true.T @ labels + TRUST * start
        given /= given.sum(axis=1, keepdims=True)
    return np.asarray(true)


def _pooled(parts: Sequence[Doubles], y: Rows, weights: Doubles) -> tuple[Doubles, float]:
    """The logarithm of the pooled probabilities [m, C], and ε."""
    from scipy.optimize import minimize

    rows, count, classes = np.arange(len(y)), len(parts), parts[0].shape[1]
    stacked, usual = np.stack(parts), np.log(np.full(count, 1 / count))

    def pool(found: Doubles) -> tuple[Doubles, float]:
        return _log_shares(np.tensordot(np.exp(found[:-1]), stacked, 1)), float(1 / (1 + np.exp(-found[-1])))

    def loss(found: Doubles) -> float:
        pooled, share = pool(found)
        right = np.exp(pooled[rows, y])
        likely = (1 - share) * right + share * (1 - right) / max(classes - 1, 1)
        prior = (
            SHARE[0] * np.log(share) + SHARE[1] * np.log1p(-share) - np.square(found[:-1] - usual).sum() / 2
        )
        return float(-prior - weights @ np.log(np.maximum(likely, 1e-300)))

    start = np.append(usual, np.log(SHARE[0] / SHARE[1]))
    bounds = [(-5.0, 3.0)] * count + [(-8.0, 2.0)]
    return pool(np.asarray(minimize(loss, start, method="L-BFGS-B", bounds=bounds).x))


def _by_file(log_shares: Doubles, of_file: Rows) -> Doubles:
    """The mean over the samples of each file [f, C]."""
    totals = np.zeros((int(of_file.max()) + 1, log_shares.shape[1]))
    np.add.at(totals, of_file, log_shares)
    return totals / np.bincount(of_file)[:, None]


def _log_shares(logits: Doubles) -> Doubles:
    """Logits [m, C] -> logarithms of probabilities, at least LOWEST."""
    logits = np.maximum(logits - logits.max(axis=1, keepdims=True), LOWEST)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
