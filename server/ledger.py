"""What devices reported over a run, one row per device: tier, samples, accuracies, release, bytes and seconds; and its summary.

`personal.test_acc.before` and `.after` in the summary are over all devices that reported them. The same names behind `head.` and `full.`
are over the devices of one tier, because they mean different things: a full device is measured around the method's own closing step, a
head-only device around a new release ("before" is the extractor and head that it served until then).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from edge_fl import metrics
from edge_fl.metrics import Summary, summarise_reports
from edge_fl.wire.messages import Report
from server.roster import Device


@dataclass(frozen=True)
class Row:
    """One line of devices.csv; accuracies are None where a device has not measured them."""

    device: str
    tier: str
    head: str
    samples: int
    before: float | None
    after: float | None
    release: int
    bytes_down: int
    bytes_up: int
    seconds: float
    machine: str


COLUMNS = {
    "device": "device",
    "tier": "tier",
    "head": "head",
    "samples": "samples",
    "before": "before",
    "after": "after",
    "release": "release",
    "bytes_down": "bytes down",
    "bytes_up": "bytes up",
    "seconds": "seconds",
    "machine": "machine",
}


@dataclass
class _Tally:
    """The sums over one device's reports; metrics are those of its last head, or the last known of each name."""

    samples: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    release: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


class Ledger:
    """`note` is called for every report that counts, from whichever thread hears it."""

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}
        self._lock = threading.Lock()

    def note(self, device: str, report: Report) -> None:
        """Adds one accepted report."""
        with self._lock:
            tally = self._tallies.setdefault(device, _Tally())
            tally.bytes_down += report.bytes_down
            tally.bytes_up += report.bytes_up
            tally.seconds += max(report.seconds, 0.0)
            if report.error:
                return
            tally.samples = report.samples
            if report.kind == "head":
                tally.release, tally.metrics = report.release, dict(report.metrics)
            else:
                tally.metrics |= report.metrics

    def rows(self, devices: Mapping[str, Device]) -> list[Row]:
        """One row per device that was there or reported, ascending."""
        with self._lock:
            names = sorted(self._tallies.keys() | devices.keys())
            return [_row(name, self._tallies.get(name, _Tally()), devices.get(name)) for name in names]

    def reports(self, devices: Mapping[str, Device], tier: str = "") -> list[dict[str, float]]:
        """The metrics of every device, or of those of one tier."""
        with self._lock:
            return [
                dict(t.metrics)
                for name, t in sorted(self._tallies.items())
                if tier in ("", _tier(devices.get(name))) and t.metrics
            ]

    def summaries(self, devices: Mapping[str, Device]) -> dict[str, Summary]:
        """Every metric over all devices, then over each tier under the tier's name."""
        found = summarise_reports(self.reports(devices))
        for tier in ("head", "full"):
            of_tier = summarise_reports(self.reports(devices, tier))
            found |= {f"{tier}.{name}": summary for name, summary in of_tier.items()}
        return found


def as_cells(row: Row) -> dict[str, object]:
    """A row by column."""
    return asdict(row)


def _row(name: str, tally: _Tally, device: Device | None) -> Row:
    capability = device.capability if device else None
    return Row(
        name,
        _tier(device),
        capability.head if capability else "",
        tally.samples or (capability.samples if capability else 0),
        tally.metrics.get(metrics.PERSONAL_BEFORE),
        tally.metrics.get(metrics.PERSONAL_AFTER),
        tally.release,
        tally.bytes_down,
        tally.bytes_up,
        tally.seconds,
        capability.machine if capability else "",
    )


def _tier(device: Device | None) -> str:
    return device.capability.tier if device and device.capability else "unknown"
