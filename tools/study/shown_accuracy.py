"""Whether the accuracy that a device shows is that on unseen images, and whether its interval covers it.

python -m tools.study.shown_accuracy              40 draws at 2, 3, 4, 5 and 10 labels per class; one minute
python -m tools.study.shown_accuracy --draws 10   fewer draws

Images are scikit-learn's digits. A small CNN, trained on 600 of them, is the extractor; its own linear head is the fleet's head. Each draw
takes the labels of a device and 200 other images from the rest, fits as a device does (`fit_here`), and compares the accuracy that would be
shown, `Calibration.accuracy`, and its 90 % interval with the accuracy on the 200. A new extractor is trained every ten draws. Releases
with the fleet's head and without one; devices with all ten classes, and with five.

The expected calibration error has 15 bins of equal width, and is taken of all unseen images of the draw's classes.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import nn

from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl.data.samples import Array
from edge_fl.heads import HeadPlan
from edge_fl.heads.head import Extras
from edge_fl_devices.workers.head_fitting import FitData, FitSpec, fit_here

CLASSES, TRAINED, UNSEEN, BINS = 10, 600, 200, 15
LABELS = (2, 3, 4, 5, 10)
DRAWS_PER_EXTRACTOR = 10
RELEASES = {"fleet's head": HeadPlan(fleet="head"), "none": HeadPlan()}
BIAS, COVERED, ERROR = 3.0, (85.0, 95.0), 0.08
"""Acceptance: points, per cent, and expected calibration error from three labels per class on."""


@dataclass(frozen=True, eq=False)
class Extractor:
    """Features z [n, d] and class ids y [n] of the images that the extractor was not trained on, and its fleet's head."""

    z: Array
    y: Array
    extras: Extras


@dataclass(frozen=True)
class Draw:
    """What one device shows and what is true, in 0..1; width: of the interval; fleet: shown and true of the fleet's head, or NaN."""

    shown: float
    true: float
    covered: bool
    width: float
    error: float
    fleet_shown: float
    fleet_true: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tools.study.shown_accuracy", None, __doc__, formatter_class=formatter
    )
    parser.add_argument("--draws", type=int, default=40)
    options = parser.parse_args(arguments)
    with threadpool_limits(1):
        extractors = [extractor(seed) for seed in range(-(-options.draws // DRAWS_PER_EXTRACTOR))]
        rows = [
            [
                release,
                str(classes),
                str(labels),
                *_figures([*draws(extractors, plan, classes, labels, options.draws)]),
            ]
            for release, plan in RELEASES.items()
            for classes in (CLASSES, CLASSES // 2)
            for labels in LABELS
        ]
    headings = [
        "release",
        "classes",
        "labels per class",
        "true",
        "shown",
        "bias",
        "covered",
        "calibration error",
    ]
    headings += ["fleet's true", "fleet's shown"]
    notes = [
        f"{options.draws} draws; means in per cent, bias in points. Covered: draws whose 90 % interval holds the accuracy on {UNSEEN}"
        f" unseen images. Expected: a bias within {BIAS:g}, {COVERED[0]:g} to {COVERED[1]:g} % covered, a calibration error of at most"
        f" {ERROR:g} from three labels per class on."
    ]
    title = "Shown accuracy and that on unseen images"
    sys.stdout.write(tables.markdown(Table(headings, rows, title, notes, headings[1:])) + "\n")


def extractor(seed: int, epochs: int = 15) -> Extractor:
    """Train a small CNN on some images, and compute the features of the others."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(y))
    images, labels = torch.tensor(x[order] / 16, dtype=torch.float32), torch.tensor(y[order])
    torch.manual_seed(seed)
    body = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(),
    )  # fmt: skip
    head = nn.Linear(64, CLASSES)
    optimiser = torch.optim.Adam([*body.parameters(), *head.parameters()], 1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(TRAINED).split(32):
            optimiser.zero_grad()
            nn.functional.cross_entropy(head(body(images[rows])), labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    with torch.no_grad():
        z = body(images[TRAINED:]).numpy()
    weight, bias = (each.detach().numpy() for each in (head.weight, head.bias))
    return Extractor(z, y[order][TRAINED:].astype(np.int64), {"head": {"weight": weight, "bias": bias}})


def draws(
    extractors: Sequence[Extractor], plan: HeadPlan, classes: int, labels: int, count: int
) -> Iterator[Draw]:
    """Devices with so many classes and labels of each."""
    for number in range(count):
        rng = np.random.default_rng((number, labels))
        yield draw(extractors[number // DRAWS_PER_EXTRACTOR], plan, classes, labels, rng)


def draw(found: Extractor, plan: HeadPlan, classes: int, labels: int, rng: np.random.Generator) -> Draw:
    """Fit the head of one device, and compare what it shows with what is true."""
    present = rng.permutation(CLASSES)[:classes]
    order = rng.permutation(np.flatnonzero(np.isin(found.y, present)))
    own = np.concatenate([order[found.y[order] == label][:labels] for label in present])
    unseen = order[~np.isin(order, own)]
    spec = FitSpec("logistic", CLASSES, False, "", plan=plan, calibrate=True)
    choice = fit_here(spec, FitData(found.z[own], found.y[own], found.extras))
    probabilities = choice.calibration.probabilities(choice.head.logits(found.z[unseen]))
    right = probabilities.argmax(axis=1) == found.y[unseen]
    true = float(right[:UNSEEN].mean())
    low, high = choice.calibration.interval
    head = found.extras["head"]
    fleets = (found.z[unseen] @ head["weight"].T + head["bias"]).argmax(axis=1) == found.y[unseen]
    shown = choice.calibration.fleet_accuracy
    return Draw(
        choice.calibration.accuracy,
        true,
        low <= true <= high,
        high - low,
        calibration_error(probabilities.max(axis=1), right),
        np.nan if shown is None else shown,
        np.nan if shown is None else float(fleets[:UNSEEN].mean()),
    )


def calibration_error(confidences: Array, right: Array) -> float:
    """Expected calibration error with BINS bins of equal width."""
    place = np.minimum((confidences * BINS).astype(int), BINS - 1)
    gaps = [abs(confidences[place == number].sum() - right[place == number].sum()) for number in range(BINS)]
    return float(sum(gaps) / len(right))


def _figures(found: Sequence[Draw]) -> list[str]:
    shown, true = (np.array([getattr(each, name) for each in found]) for name in ("shown", "true"))
    fleets = [
        100 * np.mean([each.fleet_true for each in found]),
        100 * np.mean([each.fleet_shown for each in found]),
    ]
    return [
        f"{100 * true.mean():.1f}",
        f"{100 * shown.mean():.1f}",
        f"{100 * (shown - true).mean():+.1f}",
        f"{100 * np.mean([each.covered for each in found]):.0f}",
        f"{np.mean([each.error for each in found]):.3f}",
        *("-" if np.isnan(value) else f"{value:.1f}" for value in fleets),
    ]


if __name__ == "__main__":
    main()
