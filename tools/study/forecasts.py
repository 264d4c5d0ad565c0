"""Whether a device's forecast of its accuracy with more labels is true of unseen images.

python -m tools.study.forecasts --data .data --out .study              all devices of `promise_cells`; more than an hour of one core
python -m tools.study.forecasts --data .data --out .study --devices 2  two devices of each kind in a domain

A device fits its first k labels per class as devices do (`fit_here`), forecasts the accuracy with 20 more labels and with twice as many,
and is then given these labels. Outcome: the accuracy of the head fitted on them on the device's test images. The constants of the learning
curve (`edge_fl.heads.forecast.Curve`) with which a data set is tested are those that forecast the gains of the *other* data sets with the
least squared error; without a fleet's head `forecast.ALONE`, which was chosen on these devices. Compared with "no change": the shown
accuracy with its interval as if nothing were added, at the same 80 %.

The forecast is of the accuracy on all unseen images; the outcome is measured on a finite number of test images. "Covered": outcomes in the
interval. "With test noise": outcomes in the interval widened by what an accuracy on so many test images varies. Intervals of figures:
Student's 95 % over domains, extractors or persons.

A second table: what labels of the class with the most errors alone add, against the next labels.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from edge_fl import metrics
from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl.data import grouping
from edge_fl.data.samples import Array
from edge_fl.heads import forecast
from edge_fl.heads.forecast import Curve, Forecast
from edge_fl.heads.probability_calibration import CORRELATED, Calibration
from edge_fl_devices.workers.head_fitting import FitData, FitSpec, fit_here
from tools.study import day_zero_heads, promise_cells
from tools.study.day_zero_cells import Cell

PER_CLASS = (3, 5, 10)
ONE_CLASS = 10
"""Labels of the class with the most errors."""
CURVES = [
    Curve(*constants)
    for constants in product((0.3, 1.0, 3.0), (0.1, 0.2, 0.3, 0.4, 0.5), (1.0, 3.0, 10.0, 30.0))
]
"""Constants that are tried."""


class Outcome(Struct, frozen=True):
    """A device with `labels` labels, k per class: shown accuracy and that of the fleet's head on them; true ones now and with `more`."""

    dataset: str
    place: str
    k: int
    labels: int
    more: int
    shown: float
    fleet: float | None
    now: float
    after: float
    tests: int

    def forecast(self, curve: Curve | None = None) -> Forecast:
        """What the device forecasts."""
        return forecast.of(self.shown, self.fleet, self.labels, self.labels / CORRELATED, self.more, curve)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tools.study.forecasts", None, __doc__, formatter_class=formatter
    )
    parser.add_argument("--data", type=Path, default=Path(".data"))
    parser.add_argument("--out", type=Path, default=Path(".study"))
    parser.add_argument("--devices", type=int, default=promise_cells.PARTS)
    parser.add_argument("--alone", action="store_true", help="only devices without a fleet's head: minutes")
    options = parser.parse_args(arguments)
    names = (promise_cells.PACS, promise_cells.CIFAR, promise_cells.IMU)
    found, alone, of_one_class = list[Outcome](), list[Outcome](), list[tuple[str, float, float]]()
    with threadpool_limits(1):
        for cell in promise_cells.cells(names, options.data, options.out):
            alone += outcomes(cell, options.devices, has_fleet=False)
            if not options.alone:
                found += outcomes(cell, options.devices)
                of_one_class += one_class(cell, options.devices)
    with_fleet = [] if options.alone else [table(found), table_of_one_class(of_one_class)]
    for printed in (*with_fleet, table_alone(alone)):
        sys.stdout.write(tables.markdown(printed) + "\n\n")


class LabelledDevice:
    """The first labels of one device, as many as are asked for, fitted as it would."""

    def __init__(self, cell: Cell, device: int, *, has_fleet: bool = True) -> None:
        about, self.cell = cell.about, cell
        self.order, self.tests = cell.labels(device), cell.tests(device)
        alone = replace(about.plan, fleet="", start="", shares=[])
        plan, self.extras = day_zero_heads.release(cell) if has_fleet else (alone, {})
        self.spec = FitSpec("logistic", about.classes, about.unit_norm, "", plan=plan, calibrate=True)

    def fit(self, rows: Array) -> tuple[Calibration, float]:
        """The calibration of the head of these labels, and its accuracy on the test images."""
        z, y = self.cell.z, self.cell.y
        choice = fit_here(self.spec, FitData(z[rows], y[rows], self.extras))
        return choice.calibration, metrics.accuracy(choice.head.predict(z[self.tests]), y[self.tests])


def devices(cell: Cell, most: int, *, has_fleet: bool = True) -> Iterator[tuple[str, LabelledDevice]]:
    """The first `most` devices of each kind, with their kind."""
    kinds = cell.about.rows
    for number, kind in enumerate(kinds):
        if kinds[:number].count(kind) < most:
            yield kind, LabelledDevice(cell, number, has_fleet=has_fleet)


def outcomes(cell: Cell, most: int, *, has_fleet: bool = True) -> Iterator[Outcome]:
    """All states of the first `most` devices of each kind in a cell."""
    place = repr(cell.counts.tolist())  # differ by domain, extractor and person
    for _, device in devices(cell, most, has_fleet=has_fleet):
        fits = dict[int, tuple[Calibration, float]]()
        for k in PER_CLASS:
            labels = k * cell.about.classes
            for more in (forecast.MORE, labels):
                if labels + more > len(device.order):
                    continue
                for n in {labels, labels + more} - fits.keys():
                    fits[n] = device.fit(device.order[:n])
                (shown, now), (_, after) = fits[labels], fits[labels + more]
                fleet, tests = (shown.fleet_accuracy or 0.0) if has_fleet else None, len(device.tests)
                yield Outcome(
                    cell.about.dataset, place, k, labels, more, shown.accuracy, fleet, now, after, tests
                )


def one_class(cell: Cell, most: int) -> Iterator[tuple[str, float, float]]:
    """For each device: its kind, what ONE_CLASS labels of the class with the most errors add to 5 per class, and what the next ones add.

    Errors of a class are counted together with two of its labels at the error of all. Devices without so many labels of it are left out.
    """
    for kind, device in devices(cell, most):
        labels = 5 * cell.about.classes
        own, rest = device.order[:labels], device.order[labels:]
        found, now = device.fit(own)
        each = [found.of_class(label) for label in np.unique(found.labels)]
        errors = [
            (len(of.right) / (len(of.right) + 2)) * (np.sum(~of.right) + 2 * np.mean(~found.right))
            for of in each
        ]
        chosen = rest[cell.y[rest] == each[int(np.argmax(errors))].labels[0]][:ONE_CLASS]
        if len(chosen) == ONE_CLASS:
            gains = [device.fit(np.append(own, more))[1] - now for more in (chosen, rest[:ONE_CLASS])]
            yield f"{cell.about.dataset}, {kind}", gains[0], gains[1]


def fitted(found: Sequence[Outcome]) -> Curve:
    """The constants of CURVES with which the forecast gains have the least mean squared error, of data sets that count alike."""
    sets = [
        [each for each in found if each.dataset == name] for name in sorted({each.dataset for each in found})
    ]

    def loss(curve: Curve) -> float:
        gains = [[each.forecast(curve).gain - (each.after - each.now) for each in of] for of in sets]
        return float(np.mean([np.mean(np.square(each)) for each in gains]))

    return min(CURVES, key=loss)


def table(found: Sequence[Outcome]) -> Table:
    """A line for each data set and number of labels, and for all together, each with the constants of the other data sets."""
    names = list(dict.fromkeys(each.dataset for each in found))
    curves = {name: fitted([each for each in found if each.dataset != name]) for name in names}
    said = [(each, each.forecast(curves[each.dataset])) for each in found]
    constants = "; ".join(f"{name} {tuple(curve)}" for name, curve in curves.items())
    enough, other = (
        [
            each.after - each.now
            for each, one in said
            if each.more == forecast.MORE and one.is_enough == is_enough
        ]
        for is_enough in (True, False)
    )
    notes = [
        f"Means in per cent and points, of n forecasts ({forecast.MORE} more labels, and twice as many), each with the constants (start,"
        f" rate, errors, variance) of the other data sets: {constants}; of all {tuple(fitted(found))}. Expected: 75 to 85 % covered."
        " Intervals: Student's 95 %.",
        f'"Enough" was said of {len(enough)} of {len(enough) + len(other)} forecasts of {forecast.MORE} more labels; these added'
        f" {100 * np.mean([0.0, *enough]):+.1f} points, of the other devices {100 * np.mean([0.0, *other]):+.1f}.",
    ]
    return _table(said, "Forecasts of accuracy and what came", notes)


def table_alone(found: Sequence[Outcome]) -> Table:
    """A line for each data set and number of labels of devices without a fleet's head, and for all together."""
    note = f"As above, of devices without a fleet's head, with the constants {tuple(forecast.ALONE)}, chosen on these."
    return _table([(each, each.forecast()) for each in found], "Without a fleet's head", [note])


def _table(said: Sequence[tuple[Outcome, Forecast]], title: str, notes: list[str]) -> Table:
    names = list(dict.fromkeys(each.dataset for each, _ in said))
    rows = []
    for name, k in product((*names, "all"), (*PER_CLASS, 0)):
        if of := [pair for pair in said if name in (pair[0].dataset, "all") and k in (pair[0].k, 0)]:
            rows.append([name, str(k or "all"), *figures(of)])
    headings = ["devices of", "labels per class", "n", "true now", "true after", "forecast gain", "true gain"]
    headings += [
        "error of the gain",
        "of no gain",
        "covered",
        "with test noise",
        "width",
        "covered by no change",
        "its width",
    ]
    return Table(headings, rows, title, notes, headings[2:])


def table_of_one_class(found: Sequence[tuple[str, float, float]]) -> Table:
    """A line for each kind of devices."""
    rows = []
    for kind in sorted({kind for kind, _, _ in found}):
        chosen, others = (
            100 * np.array([each[column] for each in found if each[0] == kind]) for column in (1, 2)
        )
        low, high = metrics.interval([*(chosen - others)])
        difference = f"{np.mean(chosen - others):+.1f} ({low:+.1f} to {high:+.1f})"
        rows.append([kind, str(len(chosen)), f"{chosen.mean():+.1f}", f"{others.mean():+.1f}", difference])
    headings = [
        "devices of",
        "n",
        f"gain of {ONE_CLASS} of one class",
        f"of the next {ONE_CLASS}",
        "difference",
    ]
    notes = ["Points of accuracy over that with 5 labels per class; 95 % intervals over devices."]
    return Table(headings, rows, "Labels of the class with the most errors", notes, headings[1:])


def figures(found: Sequence[tuple[Outcome, Forecast]]) -> list[str]:
    """The figures of a line; errors of gains are root mean square ones."""
    now, after = (np.array([getattr(each, name) for each, _ in found]) for name in ("now", "after"))
    gain, true = np.array([one.gain for _, one in found]), after - now
    ends = np.array([(one.low, one.high) for _, one in found])
    noise = np.array([_noise(each, one) for each, one in found])
    same = np.array(
        [grouping.interval(each.shown, each.labels / CORRELATED, grouping.Z80) for each, _ in found]
    )
    places = [each.place for each, _ in found]
    return [
        str(len(found)),
        *(f"{100 * each.mean():.1f}" for each in (now, after)),
        *(f"{100 * each.mean():+.1f}" for each in (gain, true)),
        *(f"{100 * np.sqrt(np.square(each).mean()):.1f}" for each in (gain - true, true)),
        _share(_in(after, ends), places),
        _share(_in(after, ends + np.column_stack([-noise, noise])), places),
        f"{100 * np.mean(ends[:, 1] - ends[:, 0]):.1f}",
        _share(_in(after, same), places),
        f"{100 * np.mean(same[:, 1] - same[:, 0]):.1f}",
    ]


def _in(values: Array, ends: Array) -> Array:
    return (ends[:, 0] <= values) & (values <= ends[:, 1])


def _noise(found: Outcome, said: Forecast) -> float:
    """What test noise adds to half the width of a forecast's interval: variances add up."""
    half = (said.high - said.low) / 2
    variance = found.after * (1 - found.after) / found.tests
    return float(np.sqrt(half**2 + grouping.Z80**2 * variance) - half)


def _share(is_in: Array, places: Sequence[str]) -> str:
    """The share in per cent with its 95 % interval, of `places` that count alike."""
    means = [is_in[[other == place for other in places]].mean() for place in sorted(set(places))]
    low, high = (min(max(100 * end, 0), 100) for end in metrics.interval(means))
    return f"{100 * is_in.mean():.0f} ({low:.0f} to {high:.0f})"


if __name__ == "__main__":
    main()
