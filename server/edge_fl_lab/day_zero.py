"""What head-only devices with so many labels can expect, and which method's extractor they do best on: `methods recommend --own-labels`.

The figures are a study: `python -m tools.study.day_zero` wrote day_zero.json (docs/choosing-a-method.md). It has the mean accuracies of
three heads: fitted on own labels alone, the fleet's, and the one that a device serves. The recommended method is the one that stays least
behind the best method in its worst data set, with the served head. Between two measured numbers of labels, accuracies are interpolated
over log2(1 + labels); beyond them the nearest counts.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from edge_fl.console import units
from edge_fl.console.output import terminal_lines
from edge_fl.console.tables import Table
from edge_fl.methods import PRETRAINED

FILE = Path(__file__).with_name("day_zero.json")


class DayZeroRow(Struct, frozen=True, forbid_unknown_fields=True):
    """Mean accuracies in per cent over `devices` head-only devices with `labels` labels each (their mean, where devices use all)."""

    dataset: str
    method: str
    labels: float
    devices: int
    own: float
    fleet: float
    served: float


class DayZero(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of the study: federations of `clients` full devices with `samples` training images each (fewest, most)."""

    commit: str
    clients: int
    samples: tuple[int, int]
    rows: list[DayZeroRow]


class Expected(Struct, frozen=True):
    """Accuracies in per cent on the devices of a data set."""

    dataset: str
    own: float
    fleet: float
    served: float


class MethodWithLabels(Struct, frozen=True):
    """A method: means over its data sets, the accuracies on each, and the loss to the best method in its worst data set."""

    method: str
    own: float
    fleet: float
    served: float
    worst_loss: float
    datasets: list[Expected]


class WithLabels(Struct, frozen=True):
    """The method for devices with `labels` labels in all. `rows` are sorted by `worst_loss`.

    `frozen` is of a backbone without training, on data sets that no other method has; it is not compared with the methods. `devices` is
    their number over data sets, methods and seeds.
    """

    method: str
    labels: int
    rows: list[MethodWithLabels]
    frozen: MethodWithLabels | None
    devices: int
    notes: list[str]
    commit: str


def load(path: Path = FILE) -> DayZero:
    """Read the figures that are part of the package, or another file."""
    return msgspec.json.decode(path.read_bytes(), type=DayZero)


def recommend(study: DayZero, labels: int, clients: int, samples: int) -> WithLabels:
    """Rank the methods for devices with so many labels, in a fleet with `clients` full devices with `samples` training images each."""
    of = {name: expected(study, name, labels) for name in _unique(row.method for row in study.rows)}
    frozen = of.pop(PRETRAINED, None)
    best = {
        name: max(each.served for found in of.values() for each in found if each.dataset == name)
        for name in _unique(each.dataset for found in of.values() for each in found)
    }
    rows = sorted((_row(name, found, best) for name, found in of.items()), key=lambda row: row.worst_loss)
    return WithLabels(
        rows[0].method,
        labels,
        rows,
        _row(PRETRAINED, frozen, {}) if frozen else None,
        sum(row.devices for row in study.rows if row.labels == min(row.labels for row in study.rows)),
        _notes(study, labels, clients, samples),
        study.commit,
    )


def expected(study: DayZero, method: str, labels: int) -> list[Expected]:
    """The accuracies of a method's heads with so many labels, by data set."""
    found = []
    for dataset in _unique(row.dataset for row in study.rows if row.method == method):
        rows = [row for row in study.rows if (row.method, row.dataset) == (method, dataset)]
        rows.sort(key=lambda row: row.labels)
        places = np.log2([1 + row.labels for row in rows])
        own, fleet, served = (
            float(np.interp(np.log2(1 + labels), places, [getattr(row, head) for row in rows]))
            for head in ("own", "fleet", "served")
        )
        found.append(Expected(dataset, own, fleet, served))
    return found


def text(found: WithLabels) -> str:
    """Several lines for a terminal."""
    chosen = found.rows[0]
    labels = f"{found.labels} label{'s' * (found.labels != 1)}"
    headings = ["method", "served head", "own alone", "fleet's head", "worst loss"]
    rows = [[r.method, *map(_percent, (r.served, r.own, r.fleet)), f"{r.worst_loss:.1f}"] for r in found.rows]
    lines = [
        f"recommended: {found.method}",
        f"with {labels} per device: expect about {_sentence(chosen)}, with this method",
        f"by data set (own alone, fleet's head): {_by_dataset(chosen)}",
        "why: smallest loss against the best method in its worst data set, with the served head",
    ]
    if found.frozen:
        lines.append(
            f"without training, on a frozen backbone: about {_sentence(found.frozen)}; {_by_dataset(found.frozen)}"
        )
    lines += [
        *(f"note: {note}" for note in found.notes),
        "",
        *terminal_lines(Table(headings, rows, numeric=headings[1:])),
        "",
        f"Means over data sets of {found.devices} measurements of head-only devices that never trained; code of {found.commit}.",
    ]
    return "\n".join(lines)


def _row(method: str, found: list[Expected], best: dict[str, float]) -> MethodWithLabels:
    own, fleet, served = (
        float(np.mean([getattr(each, head) for each in found])) for head in ("own", "fleet", "served")
    )
    loss = max(best.get(each.dataset, each.served) - each.served for each in found)
    return MethodWithLabels(method, own, fleet, served, loss, found)


def _notes(study: DayZero, labels: int, clients: int, samples: int) -> list[str]:
    notes = []
    low, high = study.samples
    if clients != study.clients or not low <= samples <= high:
        notes.append(
            f"measured with {study.clients} full devices of {low} to {high} images each, not with {clients} of {samples}"
        )
    most = max(row.labels for row in study.rows)
    if labels > most:
        notes.append(f"measured with up to {most:g} labels; their figures are used for {labels}")
    return notes


def _sentence(row: MethodWithLabels) -> str:
    return (
        f"{_percent(row.served)} with the served head (own alone {_percent(row.own)},"
        f" fleet's head {_percent(row.fleet)})"
    )


def _by_dataset(row: MethodWithLabels) -> str:
    return "; ".join(
        f"{each.dataset} {_percent(each.served)} ({_percent(each.own)}, {_percent(each.fleet)})"
        for each in row.datasets
    )


def _percent(value: float) -> str:
    return units.percent(value / 100)


def _unique(names: Iterable[str]) -> Sequence[str]:
    return [*dict.fromkeys(names)]
