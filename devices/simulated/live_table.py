"""A simulated fleet as a living table on the terminal: a row per device, those that do something or failed first, as many as fit."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from devices.runtime.device import Device
from devices.simulated.fleet_status import Progress, outcome
from edge_fl.console.tables import cell_text

HEADINGS = ("device", "tier", "doing", "release", "head", "before", "after", "reports", "why")
AROUND = 7  # lines of the terminal that are not rows
FEWEST = 5


def rows(devices: Sequence[Device], at_most: int) -> list[tuple[str, ...]]:
    """The devices to show, as text: who failed, then who is busy, then by name."""
    ranked = sorted(devices, key=lambda one: (not one.state.why, one.state.activity == "idle", one.name))
    return [_row(device) for device in ranked[:at_most]]


class Screen:
    """Draws while it is entered; `devices` is the runner's own list, which grows as devices join."""

    def __init__(self, console: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self.devices: Sequence[Device] = ()
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __call__(self, progress: Progress) -> None:
        """Draws the fleet as it is now."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        fitting = max(self._console.height - AROUND, FEWEST)
        hidden = len(self.devices) - fitting
        table = Table(
            box=SIMPLE_HEAD, caption=f"and {hidden} more" if hidden > 0 else None, title=str(progress)
        )
        for heading in HEADINGS:
            table.add_column(
                heading, justify="right" if heading in ("release", "before", "after", "reports") else "left"
            )
        for row in rows(self.devices, fitting):
            table.add_row(*map(Text, row))
        self._live.update(table, refresh=True)


def _row(device: Device) -> tuple[str, ...]:
    found, state = outcome(device), device.state
    doing = state.activity if state.connected else "away"
    release = str(found.release) if found.release else "-"
    numbers = (cell_text(found.before), cell_text(found.after), str(found.accepted))
    return (found.device, found.tier, doing, release, found.head or "-", *numbers, found.why)
