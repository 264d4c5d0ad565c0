"""Group samples, fit a head after a label and order unlabelled files, in a child: `python -m edge_fl_maker.labelling.immediate`.

Where the release has a fleet's head, that is adapted to the labels (`edge_fl.heads.served`), of which there may be none. Without one only
heads in closed form are fitted here, without scikit-learn: the release's own linear head if it has one, the class means if the device
is configured for them, else ridge regression (`cosine`). With 2,000 pictures, 1,280 features and ten classes that takes 0.4 s of one
core, and so does each fold of its calibration; after CALIBRATION_S no further fold is computed. The agent fits the configured kind later.

Unlabelled files are ordered by what a label would add: uncertainty of the head plus novelty among the features, both of the mean over a
file's samples. A file is covered as far as it is similar to a labelled or an already chosen one, by the cosine of their directions.
Greedily the file is chosen next that adds most to the sum of the files' covers, weighted by 1 plus their uncertainty (1 minus the
difference of the two highest probabilities). So it is far from the labelled ones, typical of others that are, too, and among those that the
head confuses. Without a head all weights are equal: this is the facility location problem, whose greedy solution is within a factor 1 - 1/e
of the best (Nemhauser, Wolsey and Fisher, Mathematical Programming, 1978). `python -m tools.study.label_selection` compares it with a
random choice.

If more unlabelled files are unknown (`edge_fl.heads.unknowns`) than false alarms explain, those that resemble each other may be of a class
that the device lacks. Two resemble each other if the cosine of their directions from the centre of the classes is that of two samples of
one class on average. The file that most others resemble and these are a group, then the same among the rest. `python -m
tools.study.unknowns` measures how many of a group are of one class.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from edge_fl import heads
from edge_fl.data import grouping
from edge_fl.data.grouping import Groups, alone
from edge_fl.heads import Cosine, HeadPlan, Logistic, Nearest
from edge_fl.heads.auto import AUTO
from edge_fl.heads.head import Array
from edge_fl.heads.label_doctor import Examination
from edge_fl.heads.linear import direction
from edge_fl.heads.unknowns import KnownClasses
from edge_fl.inputs import Kind
from edge_fl.seeds import generator
from edge_fl_devices.child import decode, encode, serve
from edge_fl_devices.features import feature_rows
from edge_fl_devices.workers import head_updates, label_examination
from edge_fl_devices.workers.class_statistics import StatisticsOffers
from edge_fl_devices.workers.head_fitting import FitData, FitSpec, FittedHead, fit_here

MOST_COVERED = 1000
"""Files whose cover is computed, a sample of more."""
LEAST_ALIKE = 3
"""Scenes that a group of files is of at least."""
MOST_GREEDY = 100
"""Files chosen one after the other; the rest follow by what each would add to these."""

Features = NDArray[np.float32]
MODULE = "edge_fl_maker.labelling.immediate"
CALIBRATION_S = 0.3
CLOSED_FORM = {"cosine", "ridge"}
"""Ways of a release's own head that need neither iterations nor scikit-learn."""


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
        return np.asarray(np.maximum(similarity - covered, 0) @ weights)

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
    return 1 - np.asarray(two[:, 1] - two[:, 0], np.float32)


class ImmediateFit(Struct, frozen=True, tag="fit"):
    """Fit the head of `spec` on labelled rows of a file of features [n, dim] with class ids y [n] and `groups` [n] (empty: all alone).

    `extras` are files of the release, `folder` is that of the device. unlabelled: rows of files without a label; importance: as of
    `FitData`.
    """

    file: str
    dim: int
    rows: Array
    y: Array
    spec: FitSpec
    extras: dict[str, str] = {}
    folder: str = ""
    groups: Array = field(default_factory=alone)
    unlabelled: Array = field(default_factory=lambda: np.empty(0, np.int64))
    importance: Array = field(default_factory=lambda: np.empty(0))


class Grouping(Struct, frozen=True, tag="group"):
    """Tell which samples of these rows of a file of features [n, dim] belong together -> groups [n], empty if all are alone."""

    file: str
    dim: int
    rows: Array
    kind: Kind


class LabelExamination(Struct, frozen=True, tag="examine"):
    """Examine the labels of a fit's rows, which are of files with these `counts` [f] of samples and `names`."""

    fit: ImmediateFit
    counts: Array
    names: list[str]
    classes: list[str]
    kind: Kind


class Ordering(Struct, frozen=True, tag="order"):
    """Order unlabelled files by their rows of a file of features [n, dim], given the labelled rows and the current head, if any.

    counts [m]: how many of the `rows` each file has. Files with a mean distance above `furthest` are unknown.
    """

    file: str
    dim: int
    rows: Array
    counts: Array
    labelled: Array
    head: FittedHead | None = None
    furthest: float = 1.0
    kind: Kind = "picture"


class Ordered(Struct, frozen=True):
    """Positions of files: the most informative first; and of those that resemble each other and no class, a list each."""

    order: Array
    alike: list[Array]


def immediate_kind(kind: str, plan: HeadPlan) -> str:
    """Return the kind of head to fit at once on a device that is configured for `kind`.

    Of kinds that use the fleet's head it is this head without a residual, whose fit takes longer.
    """
    if adapts_fleet(kind, plan):
        return Logistic.kind
    if kind == Nearest.kind or (kind == Logistic.kind and plan.way in CLOSED_FORM):
        return kind
    return Cosine.kind


def adapts_fleet(kind: str, plan: HeadPlan) -> bool:
    """Whether a device that is configured for `kind` serves the fleet's head of a release, so that it predicts without labels."""
    return heads.uses_fleet(Logistic.kind if kind == AUTO else kind, plan)


def fit(request: ImmediateFit) -> FittedHead:
    """Fit and calibrate a head. Raises DataError, ArtefactError."""
    spec = replace(request.spec, calibrate=True, budget_s=CALIBRATION_S)
    return FittedHead.of(fit_here(spec, _data(request)))


def examine(request: LabelExamination) -> Examination:
    """Examine labels. Raises DataError, ArtefactError."""
    fit, duplicates = request.fit, alone()
    if request.kind == "picture":
        duplicates = feature_rows.read_near_duplicates(Path(fit.file), fit.dim, fit.rows)
    files = np.repeat(np.arange(len(request.counts)), request.counts)
    return label_examination.examine(fit.spec, _data(fit), files, request.names, request.classes, duplicates)


def _data(request: ImmediateFit) -> FitData:
    z = feature_rows.read(Path(request.file), request.dim, request.rows)
    extras = head_updates.read_extras({name: Path(path) for name, path in request.extras.items()})
    extras = StatisticsOffers(Path(request.folder)).without_own(extras, request.spec.extractor)
    unlabelled = feature_rows.read(Path(request.file), request.dim, request.unlabelled)
    return FitData(
        z,
        request.y,
        extras,
        groups=request.groups,
        unlabelled=unlabelled,
        importance=request.importance,
    )


def order(request: Ordering) -> Ordered:
    """Order the unlabelled files; equal ones at random, with a fixed seed."""
    of_samples = feature_rows.read(Path(request.file), request.dim, request.rows)
    labelled = feature_rows.read(Path(request.file), request.dim, request.labelled)
    z, probabilities, alike = _means(of_samples, request.counts), None, list[Array]()
    if request.head:
        current = request.head.choice()
        found = current.calibration.probabilities(current.head.logits(of_samples))
        probabilities = _means(found, request.counts)
        distances = current.calibration.percentiles(of_samples, found.argmax(axis=1))
        unknown = np.flatnonzero(_means(distances, request.counts) > request.furthest)
        if current.calibration.are_more(len(unknown), len(z), 1 - request.furthest):
            first = request.rows[np.cumsum(request.counts)[unknown] - 1]
            scenes = feature_rows.read_groups(Path(request.file), request.dim, first, request.kind)
            alike = [unknown[rows] for rows in resembling(z[unknown], current.calibration.known, scenes)]
    return Ordered(informative(z, probabilities, labelled, len(z), generator(0, "informative")), alike)


def resembling(z: Features, known: KnownClasses, scenes: Groups) -> list[Array]:
    """Rows of features z [n, d] that resemble each other, in groups of LEAST_ALIKE of the `scenes` [n] or more, the largest first.

    None with a single class, of which no centre is known.
    """
    if len(known.classes) < 2:
        return []
    centre = known.means.mean(axis=0)
    u = direction(z) - centre
    u /= np.maximum(np.linalg.norm(u, axis=1, keepdims=True), 1e-6)
    of_one_class = np.square(known.means - centre).sum(axis=1) / max(1 - float(centre @ centre), 1e-6)
    alike, groups = u @ u.T >= np.median(of_one_class), list[Array]()
    np.fill_diagonal(alike, val=True)
    while True:
        rows = np.flatnonzero(alike[alike.sum(axis=1).argmax()])
        if grouping.count(scenes[rows] if len(scenes) else scenes, len(rows)) < LEAST_ALIKE:
            return groups
        groups.append(rows)
        alike[rows], alike[:, rows] = False, False


def _means(of_samples: Features, counts: Array) -> Features:
    """Means [m, ...] over the samples of each file, which follow one another."""
    if len(of_samples) == len(counts):
        return of_samples
    totals = np.add.reduceat(of_samples, np.cumsum(counts) - counts)
    return np.asarray(totals / counts[:, None], np.float32)


def _respond(payload: bytes) -> bytes:
    match decode(payload, ImmediateFit | Grouping | LabelExamination | Ordering):  # type: ignore[arg-type]
        case ImmediateFit() as request:
            return encode(fit(request))
        case Grouping(file, dim, rows, kind):
            return encode(feature_rows.read_groups(Path(file), dim, rows, kind))
        case LabelExamination() as request:
            return encode(examine(request))
        case request:
            return encode(order(request))


if __name__ == "__main__":
    sys.exit(serve("labelling", _respond))
