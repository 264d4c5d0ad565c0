"""How accurate a head-only device is with no, few and many labels: its own head alone, the fleet's head, and the head that it serves.

python -m tools.study.day_zero --data .data                    everything; the folder has the .npz files of the larger data sets
python -m tools.study.day_zero --datasets digits               without files, in two minutes
python -m tools.study.day_zero --methods fedavg,fedrep         with these methods alone
python -m tools.study.day_zero --minutes 5                     for five minutes; finished cells are kept, the same command continues

First it trains the extractors and keeps the devices' features in --out (tools/study/day_zero_cells.py describes the files); then it
fits the heads (tools/study/day_zero_heads.py) on the first labels of each device, and tests all of them on the same other images.
It prints the table, and writes the means for `edge-fl methods recommend --tier head --own-labels N`.
"""

import argparse
import logging
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

import edge_fl
from edge_fl import metrics
from edge_fl.console import tables
from edge_fl.console.tables import Table
from edge_fl.data.samples import Array
from edge_fl.errors import InputError
from edge_fl.files import atomic
from edge_fl.methods import PRETRAINED
from edge_fl_lab.day_zero import FILE, DayZero, DayZeroRow
from edge_fl_lab.recommend import difference, difference_text
from edge_fl_server.runs.results import commit
from edge_fl_server.runs.summaries import Paired
from tools.study import day_zero_cells
from tools.study import day_zero_training as training
from tools.study.day_zero_cells import Cell
from tools.study.day_zero_heads import FLEET, HEADS, OWN, SERVED, Fit

LABELS = {"0": 0, "1": 1, "3": 3, "10": 10, "40": 40, "all": None}
"""Labels of a device in all; "all": all that it has."""
BELOW = 3.0
"""Points below the better of own and fleet that count as a loss for a device."""
TOLERANCE = 0.5
"""Points that the served head's mean may be below the better mean."""
TENTH = 0.1
"""Share of the devices that may lose."""


@dataclass(frozen=True)
class Score:
    """Accuracies in per cent of one device with so many labels, by head."""

    row: str
    method: str
    labels: str
    count: int
    accuracy: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Line:
    """A line of the table: the devices of one data set, method and number of labels in all seeds."""

    row: str
    method: str
    labels: str
    scores: Sequence[Score]

    def values(self, head: str) -> Array:
        """The devices' accuracies with a head."""
        return np.array([score.accuracy[head] for score in self.scores])

    def mean(self, head: str) -> float:
        """Their mean."""
        return float(self.values(head).mean())

    @property
    def better(self) -> str:
        """Own or fleet: the one with the higher mean."""
        return max((OWN, FLEET), key=self.mean)

    def gain(self, over: str) -> Paired | None:
        """Served minus another head, with Student's interval over devices; None for one device."""
        return difference(self.values(SERVED), self.values(over))

    @property
    def losing(self) -> float:
        """Share of the devices on which served is more than BELOW points below their better one of own and fleet."""
        best = np.maximum(self.values(OWN), self.values(FLEET))
        return float((best - self.values(SERVED) > BELOW + 1e-9).mean())

    @property
    def holds(self) -> bool:
        """Whether the line meets the acceptance."""
        return self.mean(SERVED) >= self.mean(self.better) - TOLERANCE and self.losing <= TENTH


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is left of the study, and print its table."""
    methods = (*training.METHODS, PRETRAINED)
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m tools.study.day_zero", None, __doc__, formatter_class=formatter
    )
    parser.add_argument("--data", type=Path, default=Path(".data"), help="folder of the .npz files [.data]")
    parser.add_argument("--out", type=Path, default=Path("runs/day_zero"), help="folder of the stored cells")
    parser.add_argument("--datasets", default=",".join(training.SIZES), help="comma-separated")
    parser.add_argument("--methods", default=",".join(methods), help=f"{PRETRAINED}: the backbone, for pacs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="pause after so many minutes")
    parser.add_argument("--results", type=Path, default=None, help=f"file of the means [OUT/{FILE.name}]")
    options = parser.parse_args(arguments)
    names, wanted = options.datasets.split(","), options.methods.split(",")
    for known, words in ((training.SIZES, names), (methods, wanted)):
        if unknown := [word for word in words if word not in known]:
            parser.error(f"{unknown[0]!r} is unknown, expected {', '.join(known)}")
    places = [*training.places(names, wanted, options.seeds)]
    if not places:
        parser.error(f"no cell of {options.datasets} with {options.methods}; {PRETRAINED} is for pacs alone")
    until = time.monotonic() + 60 * options.minutes
    try:
        missing = [place for place in places if not training.made(place, options.data, options.out, until)]
    except InputError as error:
        parser.error(str(error))
    if missing:
        sys.stdout.write(f"paused; finished cells are in {options.out}, and the same command continues\n")
        return
    cells = (day_zero_cells.read(place.path(options.out)) for place in places)
    found = lines(score for cell in cells for score in evaluate(cell))
    atomic.write(options.results or options.out / FILE.name, msgspec.json.encode(result(found)) + b"\n")
    sys.stdout.write(tables.markdown(table(found)) + "\n")


def evaluate(cell: Cell, heads: Mapping[str, Fit] = HEADS) -> Iterator[Score]:
    """Test each head on each device of a cell, with each number of labels."""
    with threadpool_limits(1):
        for device, row in enumerate(cell.about.rows):
            rows, tests = cell.labels(device), cell.tests(device)
            for name, most in LABELS.items():
                some = rows[:most]
                found = {head: _accuracy(fit, cell, some, tests) for head, fit in heads.items()}
                yield Score(row, cell.about.method, name, len(some), found)


def lines(scores: Iterable[Score]) -> list[Line]:
    """Group the scores, in the order in which they come."""
    groups: dict[tuple[str, str], dict[str, list[Score]]] = {}
    for score in scores:
        by_labels = groups.setdefault((score.row, score.method), {name: [] for name in LABELS})
        by_labels[score.labels].append(score)
    return [
        Line(row, method, labels, found)
        for (row, method), by_labels in groups.items()
        for labels, found in by_labels.items()
    ]


def table(found: Sequence[Line]) -> Table:
    """Means over devices in per cent, and differences in points."""
    headings = ["data set", "method", "labels", "n", "own only", "fleet's head", "served"]
    headings += ["served - better", "served - own", "served - fleet", f"more than {BELOW:g} below", "holds"]
    rows = [
        [
            line.row,
            line.method,
            line.labels,
            str(len(line.scores)),
            *(f"{line.mean(head):.1f}" for head in (OWN, FLEET, SERVED)),
            *(difference_text(line.gain(over)) for over in (line.better, OWN, FLEET)),
            f"{100 * line.losing:.0f} %",
            "yes" if line.holds else "no",
        ]
        for line in found
    ]
    notes = [
        "n devices; differences in points with 95 % intervals (Student's t over devices)."
        " Better: own or fleet, whichever has the higher mean.",
        f"More than {BELOW:g} below: share of devices on which served is that many points below their better one."
        f" Holds: served is at least the better mean - {TOLERANCE:g}, and at most {100 * TENTH:.0f} % of the devices lose.",
        f"{sum(line.holds for line in found)} of {len(found)} lines hold.",
    ]
    return Table(headings, rows, "Accuracy by labels of a device in all, %", notes, headings[3:])


def result(found: Sequence[Line]) -> DayZero:
    """The means, as `edge-fl methods recommend` reads them."""
    rows = [
        DayZeroRow(
            line.row,
            line.method,
            round(float(np.mean([score.count for score in line.scores])), 1),
            len(line.scores),
            *(round(line.mean(head), 1) for head in (OWN, FLEET, SERVED)),
        )
        for line in found
    ]
    state = commit(Path(edge_fl.__file__).parent)
    sizes = [each.full for each in training.SIZES.values() if each.full]
    version = f"{state.sha[:7]}{'+' * state.dirty}" if state else ""
    return DayZero(version, training.FULL, (min(sizes), max(sizes)), rows)


def _accuracy(fit: Fit, cell: Cell, rows: Array, tests: Array) -> float:
    """Accuracy in per cent; 0 where there is nothing to predict with."""
    head = fit(cell.z[rows], cell.y[rows], cell)
    if head is None:
        return 0.0
    return 100 * metrics.accuracy(head.logits(cell.z[tests]).argmax(axis=1), cell.y[tests])


if __name__ == "__main__":
    logging.getLogger("edge_fl_server").setLevel(logging.ERROR)  # of this process only: tests call `main`
    main()
