"""What devices with few labels can expect: mean accuracies of their own head, the fleet's head and the served head, by labels per device.

The figures are a study of head-only devices: `python -m tools.study.day_zero` wrote day_zero.json (docs/choosing-a-method.md).
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

FILE = Path(__file__).with_name("day_zero.json")


class DayZeroRow(Struct, frozen=True, forbid_unknown_fields=True):
    """Mean accuracies in per cent over `devices` head-only devices with `labels` labels each (a mean, where devices have all they have)."""

    dataset: str
    method: str
    labels: float
    devices: int
    own: float
    fleet: float
    served: float


class DayZero(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of the study; `conditions` says of what size its federations are."""

    commit: str
    conditions: str
    rows: list[DayZeroRow]


class Expected(Struct, frozen=True):
    """Accuracies in per cent that a device can expect, means over `datasets`."""

    method: str
    datasets: list[str]
    own: float
    fleet: float
    served: float


def load(path: Path = FILE) -> DayZero:
    """Read the figures that are part of the package, or another file."""
    return msgspec.json.decode(path.read_bytes(), type=DayZero)


def expected(study: DayZero, labels: int) -> list[list[Expected]]:
    """Expectations with so many labels per device, by method and data set; one list per method.

    Between two measured numbers of labels, accuracies are interpolated over log2(1 + labels); outside them the nearest counts.
    """
    found = []
    for method in _names(row.method for row in study.rows):
        rows = [row for row in study.rows if row.method == method]
        names = _names(row.dataset for row in rows)
        found.append([_at(labels, method, [row for row in rows if row.dataset == name]) for name in names])
    return found


def mean(each: list[Expected]) -> Expected:
    """The mean over a method's data sets."""
    values = {
        name: float(np.mean([getattr(one, name) for one in each])) for name in ("own", "fleet", "served")
    }
    return Expected(each[0].method, _names(name for one in each for name in one.datasets), **values)


def measured(study: DayZero) -> tuple[float, float]:
    """The smallest and the largest number of labels that was measured."""
    counts = [row.labels for row in study.rows]
    return min(counts), max(counts)


def _at(labels: int, method: str, rows: list[DayZeroRow]) -> Expected:
    rows = sorted(rows, key=lambda row: row.labels)
    x = np.log2([1 + row.labels for row in rows])
    values = {
        name: float(np.interp(np.log2(1 + labels), x, [getattr(row, name) for row in rows]))
        for name in ("own", "fleet", "served")
    }
    return Expected(method, [rows[0].dataset], **values)


def _names(names: Iterable[str]) -> list[str]:
    return [*dict.fromkeys(names)]
