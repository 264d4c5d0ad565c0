"""Table of a simulated fleet on the terminal, updated in place: one row per device, failed and busy devices first."""

from collections.abc import Sequence
from typing import Any, Self

from edge_fl.console.layout import fitted
from edge_fl.console.tables import Table
from edge_fl.console.units import percent
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.simulated.fleet_status import device_result, fleet_progress

HEADINGS = ("device", "tier", "activity", "release", "head", "before", "after", "reports", "why")
NUMERIC = ("release", "before", "after", "reports")
RANKS = {"head": 3, "reports": 2, "before": 1}
OTHER_LINES = 7  # terminal lines for the title, headings and caption
MIN_ROWS = 5


def rows(devices: Sequence[Device], at_most: int) -> list[tuple[str, ...]]:
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
        table = Table(HEADINGS, rows(devices, shown), numeric=NUMERIC, ranks=RANKS)
        lines = [fleet_progress(devices), "", *fitted(table, self._console.width, stacked=False), *more]
        self._live.update(self._text("\n".join(lines), no_wrap=True), refresh=True)


def _row(device: Device) -> tuple[str, ...]:
    result, state = device_result(device), device.state
    activity = state.activity if state.connected else "away"
    release = str(result.release) if result.release else "-"
    numbers = (percent(result.before), percent(result.after), str(result.accepted))
    return (result.device, result.tier, activity, release, result.head or "-", *numbers, result.why)
