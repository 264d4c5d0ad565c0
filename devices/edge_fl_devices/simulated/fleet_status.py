"""Progress of a simulated fleet, and the final result of each device, as values for display."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from edge_fl import metrics
from edge_fl.fields import Tier
from edge_fl_devices.runtime.device import Device


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """Result of one device: accuracies of its last reports (None: not measured), bytes and seconds summed over all reports."""

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

    @property
    def accuracy(self) -> float | None:
        """An accuracy that it reported; None if it reported none."""
        return next(
            (value for value in (self.after, self.before, self.global_test) if value is not None), None
        )


def fleet_progress(devices: Sequence[Device]) -> str:
    """Describe the fleet in one line: connections, devices by activity, heads, and reports accepted by the server."""
    states = [device.state for device in devices]
    connected, serving = sum(state.connected for state in states), sum(state.release > 0 for state in states)
    activities = Counter(state.activity for state in states if state.activity != "idle")
    busy = ", ".join(f"{count} {name}" for name, count in sorted(activities.items()))
    online = any(state.server_online for state in states)
    accepted = sum(device.reporting.acknowledged["accepted"] for device in devices)
    alerts = sum(bool(state.why) for state in states)
    return (
        f"{connected}/{len(devices)} connected · {'server online' if online else 'waiting for the server'} · "
        f"{busy or 'idle'} · {serving} serving a head · {accepted} reports accepted"
        f"{f' · {alerts} alerts' if alerts else ''}"
    )


def device_result(device: Device) -> DeviceResult:
    """Collect the result of one device."""
    reports, values = device.reporting.last, {}
    for kind in ("evaluation", "personal", "head"):
        values.update(reports[kind].metrics if kind in reports else {})
    return DeviceResult(
        device=device.name,
        tier=device.state.tier.value,
        head=reports["head"].head if "head" in reports else "",
        samples=device.state.capability.samples,
        release=device.state.release,
        reports=device.reporting.totals["reports"],
        accepted=device.reporting.acknowledged["accepted"],
        before=values.get(metrics.PERSONAL_BEFORE),
        after=values.get(metrics.PERSONAL_AFTER),
        global_test=values.get(metrics.GLOBAL_TEST),
        bytes_down=device.reporting.totals["bytes_down"],
        bytes_up=device.reporting.totals["bytes_up"],
        seconds=device.reporting.totals["milliseconds"] / 1000,
        why=device.state.why or next((report.error for report in reports.values() if report.error), ""),
    )


def unmeasured(results: Sequence[DeviceResult]) -> str:
    """Why no full device could evaluate or personalise; "" where one could, or where not all that reported have failed."""
    full = [result for result in results if result.tier == Tier.FULL.value and result.reports]
    if not full or not all(result.why and result.accuracy is None for result in full):
        return ""
    return (
        f"no full device could evaluate or personalise: {', '.join(sorted({result.why for result in full}))}"
    )
