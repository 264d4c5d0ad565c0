"""How it goes with a fleet of simulated devices, at one moment and in the end, as values for whoever prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from devices.runtime.device import Device
from edge_fl import metrics


@dataclass(frozen=True, slots=True)
class DeviceOutcome:
    """What one device came to: accuracies as in its last reports (None: not measured), bytes and seconds over all of them."""

    device: str
    tier: str
    head: str
    samples: int
    release: int
    reports: int
    accepted: int
    before: float | None
    after: float | None
    global_test: float | None
    bytes_down: int
    bytes_up: int
    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class Progress:
    """A fleet at one moment: devices by activity, and reports taken by the server."""

    devices: int
    connected: int
    lost: int
    server_online: bool
    activities: Counter[str]
    served: int
    alerts: int
    accepted: int

    def __str__(self) -> str:
        busy = ", ".join(
            f"{count} {name}" for name, count in sorted(self.activities.items()) if name != "idle"
        )
        server = "server online" if self.server_online else "waiting for the server"
        alerts = f" · {self.alerts} alerts" if self.alerts else ""
        return (
            f"{self.connected}/{self.devices} connected · {server} · {busy or 'idle'} · "
            f"{self.served} serve a head · {self.accepted} reports taken{alerts}"
        )


def progress(devices: Sequence[Device]) -> Progress:
    """The fleet now."""
    return Progress(
        len(devices),
        sum(found.state.connected for found in devices),
        sum(bool(found.denied) for found in devices),
        any(found.state.server_online for found in devices),
        Counter(found.state.activity for found in devices),
        sum(found.state.release > 0 for found in devices),
        sum(bool(found.state.why) for found in devices),
        sum(found.acknowledged["accepted"] for found in devices),
    )


def outcome(device: Device) -> DeviceOutcome:
    """What became of a device."""
    reports, found = device.reports, {}
    for kind in ("evaluation", "personal", "head"):
        found.update(reports[kind].metrics if kind in reports else {})
    return DeviceOutcome(
        device.name,
        device.state.tier.value,
        reports["head"].head if "head" in reports else "",
        device.state.capability.samples,
        device.state.release,
        device.totals["reports"],
        device.acknowledged["accepted"],
        found.get(metrics.PERSONAL_BEFORE),
        found.get(metrics.PERSONAL_AFTER),
        found.get(metrics.GLOBAL_TEST),
        device.totals["bytes_down"],
        device.totals["bytes_up"],
        device.totals["milliseconds"] / 1000,
        device.state.why,
    )
