"""The live table of a simulated fleet: failures first, and never more rows than fit on the terminal."""

import io
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from edge_fl.wire.messages import Capability
from edge_fl.wire.topics import Topics
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.simulated.fleet import LiveTable, table_rows
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.worker import Worker


class Idle(Worker):
    """Gets no assignment."""

    def perform(self, *work: object) -> None:
        raise AssertionError


def fleet(folder: Path, count: int) -> list[Device]:
    can = Capability("head", "test", "3", samples=5, head="svm")
    names = [f"d{number:02d}" for number in range(count)]
    return [Device(n, Topics("main"), can, Idle(n, Store(folder / n))) for n in names]


def test_failures_come_first_and_rows_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    devices = fleet(tmp_path, 12)
    devices[7].state = replace(devices[7].state, why="canary_failed")
    assert [row[0] for row in table_rows(devices, 4)] == ["d07", "d00", "d01", "d02"]
    drawn = io.StringIO()
    with LiveTable(Console(file=drawn, width=140, height=14, force_terminal=True)) as table:
        table(devices)
    assert "canary_failed" in drawn.getvalue() and "and 5 more" in drawn.getvalue()
