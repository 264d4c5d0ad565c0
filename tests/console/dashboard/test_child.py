"""`server run --dashboard PORT`: the pages and /metrics answer while the run goes on, and stop with it."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx
import pytest

from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_server.children import CommandProcess
from edge_fl_server.runs.results import list_runs

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(200)]

DEADLINE_S = 90.0
WAITING = ("cohort.min_devices=1", "cohort.wait_s=150.0")  # for a device that never comes
T = TypeVar("T")


def eventually(find: Callable[[], T | None]) -> T:
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        if (found := find()) is not None:
            return found
        time.sleep(0.2)
    raise AssertionError("did not happen")


def test_the_dashboard_answers_while_a_run_goes_on_and_ends_with_it(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    output: list[str] = []
    folders = ["--runs", str(tmp_path / "runs"), "--home", str(tmp_path / "home")]
    settings = [word for setting in WAITING for word in ("--set", setting)]
    where = ["--fleet", "demo", "--port", str(mosquitto.endpoint.port), "--dashboard", "0"]
    run = CommandProcess("server", ["server", "run", "demo", *folders, *settings, *where], output.append, {})
    try:
        home = eventually(lambda: re.search(r"dashboard: (http://\S+)", "\n".join(output)))[1]
        running = 'edge_fl_runs{fleet="demo",state="running"} 1.0'
        eventually(lambda: running in httpx.get(f"{home}metrics").text or None)
        (found,) = list_runs(tmp_path / "runs")
        shown = httpx.get(f"{home}run")
        assert shown.status_code == 200 and found.run in shown.text
    finally:
        run.end()
    with pytest.raises(httpx.TransportError):
        httpx.get(home)
    assert list_runs(tmp_path / "runs")[0].state == "stopped"
    assert not [
        line for line in output if line.startswith("dashboard: edge-fl")
    ]  # that it was ended is no news
