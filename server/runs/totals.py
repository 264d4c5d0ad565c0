"""What devices and simulated clients reported over a run, one row each: samples, accuracies, release, bytes, seconds; and its summary.

`personal.test_acc.before` and `.after` in the summary are over everybody who measured them. The same names behind `head.` and `full.` are
over one tier, because they mean different things: a client that trains is measured around the method's own closing step, a head-only device
around a new release ("before" is the pair of extractor and head that it served until then). Simulated clients count as `full`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from edge_fl import metrics
from edge_fl.capability import Tier
from edge_fl.metrics import Summary, summarise_reports
from edge_fl.wire.messages import Report
from server.mqtt.devices.roster import Device

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
    "epsilon": "epsilon",
}
"""A row's fields, and how a table heads them."""


class Row(Struct, frozen=True):
    """One line of devices.csv. `samples` are training samples; accuracies are None where they were not measured.

    `epsilon` is what the device's updates have told of its data, None where it sends none with noise.
    """

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
    epsilon: float | None


@dataclass
class _Account:
    """The sums over one device's reports, and what was measured last."""

    simulated: bool = False
    samples: int = 0
    release: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


class RunTotals:
    """Fed from any thread: `note` with every report that counts, `measure` with what the round loop collected."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._lock = threading.Lock()

    def enter(self, client: str, samples: int) -> None:
        """A client that is simulated here."""
        with self._lock:
            self._accounts[client] = _Account(simulated=True, samples=samples)

    def note(self, device: str, report: Report) -> None:
        """Adds one accepted report of a device."""
        with self._lock:
            account = self._accounts.setdefault(device, _Account())
            account.bytes_down += report.bytes_down
            account.bytes_up += report.bytes_up
            account.seconds += max(report.seconds, 0.0)
            if not report.error:
                account.samples = report.samples
            if report.kind == "head" and not report.error:
                account.release, account.metrics = report.release, dict(report.metrics)
            if metrics.EPSILON in report.metrics:
                account.metrics[metrics.EPSILON] = report.metrics[metrics.EPSILON]

    def measure(self, reports: Mapping[str, Mapping[str, float]]) -> None:
        """Adds metrics by client; a later value replaces an earlier one of its name."""
        with self._lock:
            for client, found in reports.items():
                self._accounts.setdefault(client, _Account()).metrics.update(found)

    def measured(self) -> dict[str, dict[str, float]]:
        """Each client's metrics, of those that have any, ascending."""
        with self._lock:
            return {
                name: dict(found.metrics) for name, found in sorted(self._accounts.items()) if found.metrics
            }

    def rows(self, devices: Mapping[str, Device]) -> list[Row]:
        """Everybody who was there or reported, ascending."""
        with self._lock:
            names = sorted(self._accounts.keys() | devices.keys())
            return [_row(name, self._accounts.get(name, _Account()), devices.get(name)) for name in names]

    def summaries(self, devices: Mapping[str, Device]) -> dict[str, Summary]:
        """Every metric over all, then over each tier under the tier's name."""
        with self._lock:
            found = {
                name: dict(account.metrics)
                for name, account in sorted(self._accounts.items())
                if account.metrics
            }
            tiers = {name: _tier(self._accounts[name], devices.get(name)) for name in found}
        summaries = summarise_reports(list(found.values()))
        for prefix, members in (("head", {Tier.HEAD.value}), ("full", {Tier.FULL.value, "simulated"})):
            of_tier = summarise_reports([report for name, report in found.items() if tiers[name] in members])
            summaries |= {f"{prefix}.{name}": summary for name, summary in of_tier.items()}
        return summaries


def _row(name: str, account: _Account, device: Device | None) -> Row:
    capability = device.capability if device else None
    return Row(
        name,
        _tier(account, device),
        capability.head if capability else "",
        account.samples or (capability.samples if capability else 0),
        account.metrics.get(metrics.PERSONAL_BEFORE),
        account.metrics.get(metrics.PERSONAL_AFTER),
        account.release,
        account.bytes_down,
        account.bytes_up,
        account.seconds,
        capability.machine if capability else "",
        account.metrics.get(metrics.EPSILON),
    )


def _tier(account: _Account, device: Device | None) -> str:
    if account.simulated:
        return "simulated"
    return device.capability.tier if device and device.capability else "unknown"
