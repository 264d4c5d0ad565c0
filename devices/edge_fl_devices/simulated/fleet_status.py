"""Progress of a simulated fleet, in one line or as a table that is updated in place, and the final result of each device."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from edge_fl import metrics
from edge_fl.console.tables import Table, fitted
from edge_fl.console.units import percent
from edge_fl.fields import Tier
from edge_fl_devices.runtime.device import Device

HEADINGS = ("device", "tier", "activity", "release", "head", "before", "after", "reports", "why")
NUMERIC = ("release", "before", "after", "reports")
RANKS = {"head": 3, "reports": 2, "before": 1}
OTHER_LINES = 7  # terminal lines for the title, headings and caption
MIN_ROWS = 5


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


def table_rows(devices: Sequence[Device], at_most: int) -> list[tuple[str, ...]]:
    """Return the first rows: failed devices, then busy ones, then by name."""
    ranked = sorted(devices, key=lambda one: (not one.state.why, one.state.activity == "idle", one.name))
    return [_row(device) for device in ranked[:at_most]]


class LiveTable:
    """Context manager; call it with the devices to redraw the table."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self._text = Text
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, devices: Sequence[Device]) -> None:
        shown = max(self._console.height - OTHER_LINES, MIN_ROWS)
        more = [f"and {len(devices) - shown} more"] if len(devices) > shown else []
        table = Table(HEADINGS, table_rows(devices, shown), numeric=NUMERIC, ranks=RANKS)
        lines = [fleet_progress(devices), "", *fitted(table, self._console.width, stacked=False), *more]
        self._live.update(self._text("\n".join(lines), no_wrap=True), refresh=True)


def _row(device: Device) -> tuple[str, ...]:
    result, state = device_result(device), device.state
    activity = state.activity if state.connected else "away"
    release = str(result.release) if result.release else "-"
    numbers = (percent(result.before), percent(result.after), str(result.accepted))
    return (result.device, result.tier, activity, release, result.head or "-", *numbers, result.why)
