"""Tables in a real terminal of 80, 100 and 200 columns have every word of their data; what is left out is named."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from edge_fl.cli import main
from edge_fl.console import units
from edge_fl.console.units import clock
from edge_fl.errors import RunError
from edge_fl.wire.messages import Capability, DeviceState, encode
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet
from edge_fl_devices.data.record import DataRecord, DataReport
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.registry import Database, registered_devices
from edge_fl_server.registry.tables import DeviceRecord
from edge_fl_server.release.rollout.commands import ReleaseCommands
from edge_fl_server.runs.results import Results

WIDTHS = (80, 100, 200)
DEADLINE_S = 120.0
LONG = "sensor-in-the-greenhouse-north-7"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux"),
]


class Terminals:
    """tmux sessions of the three widths in which a command runs at the same time."""

    def __init__(self, folder: Path) -> None:
        settings = folder / "tmux.conf"
        settings.write_text("set -g history-limit 50000\nset -g remain-on-exit on\n")
        self._tmux = ["tmux", "-L", uuid.uuid4().hex, "-f", str(settings)]
        self._folder = folder

    def run(self, *arguments: str) -> dict[int, str]:
        """All that `edge-fl ARGUMENTS` shows, by width; every line ends where the terminal ends it."""
        command = shlex.join([sys.executable, "-m", "edge_fl", *arguments])
        for width in WIDTHS:
            size = ["-x", str(width), "-y", "50", "-s", f"w{width}", "-c", str(self._folder)]
            self._call("new-session", "-d", *size, command)
        screens = {width: self._finished(width) for width in WIDTHS}
        self.close()
        return screens

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, check=False)

    def _finished(self, width: int) -> str:
        until = time.monotonic() + DEADLINE_S
        while self._call("display-message", "-p", "-t", f"w{width}", "#{pane_dead}").strip() != "1":
            assert time.monotonic() < until, self._call("capture-pane", "-p", "-t", f"w{width}")
            time.sleep(0.1)
        return self._call("capture-pane", "-p", "-S", "-", "-t", f"w{width}")

    def _call(self, *arguments: str) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*self._tmux, *arguments], capture_output=True, text=True, env=environment, check=True
        )
        return done.stdout


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    found = Terminals(tmp_path)
    yield found
    found.close()


def said(value: object) -> list[str]:
    """The texts by which a table may show a value."""
    match value:
        case bool():
            return ["yes" if value else "no"]
        case int():
            return [str(value), units.size(value), units.size(1024 * value)]
        case float():
            return [units.percent(value), f"{value:.3f}", units.size(value)]
    return [str(value), clock(str(value))]


def holds(shown: Sequence[str], text: str) -> bool:
    return all(word in shown for word in text.split())


def check(screens: dict[int, str], rows: Sequence[dict[str, Any]]) -> None:
    """Every value of every row is on the screen in whole words, or its column is named as left out."""
    assert rows
    for width, screen in screens.items():
        note = re.search(r"^not shown in this width: (.*)", screen, re.MULTILINE)
        left_out = note[1].split(", ") if note else []
        assert not left_out or width == 100
        words = [word for shown in screen.split() for word in (shown, shown.removesuffix(":"))]
        missing = {
            key
            for row in rows
            for key, value in row.items()
            if value not in (None, "", "-") and not any(holds(words, text) for text in said(value))
        }
        assert len(missing) <= len(left_out), f"{width} columns: no {missing}\n{screen}"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """The same table as JSON."""
    capsys.readouterr()
    assert main([*arguments, "--format", "json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_methods(terminals: Terminals, capsys: pytest.CaptureFixture[str]) -> None:
    check(terminals.run("methods", "list"), printed(capsys, "methods", "list"))


def test_runs(terminals: Terminals, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Recipe(name="a-recipe-with-a-rather-long-name")
    with pytest.raises(RunError), Results.create(tmp_path / "runs", recipe):
        raise RunError(f"no quorum in round 12: only 3 of 40 clients responded, the last one was {LONG}")
    command = ["runs", "list", "--runs", str(tmp_path / "runs")]
    check(terminals.run(*command), printed(capsys, *command))


def test_releases(
    terminals: Terminals, releases: ReleaseCommands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    releases.db.close()
    command = ["release", "list", "--home", str(tmp_path / "home")]
    check(terminals.run(*command), printed(capsys, *command))


def test_the_status_of_a_device(
    terminals: Terminals,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder := Path(LONG)).mkdir()
    classes = tuple(f"class-{number:02d}" for number in range(14))
    report = DataReport(classes, tuple(range(100, 114)), {"not a picture": 3}, disappeared=("cat",))
    (folder / "data.json").write_bytes(encode(DataRecord(report)))
    command = ["device", "status", "--dir", str(folder)]
    check(terminals.run(*command), printed(capsys, *command))


@pytest.mark.broker
def test_a_fleet(
    terminals: Terminals, own_mosquitto: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topics, endpoint = Topics("main"), own_mosquitto.endpoint
    with closing(Database.open(tmp_path / "server" / "registry.sqlite")) as db:
        for number in range(3):
            name = f"{LONG}{number}"
            can = Capability("head", "aarch64, 4 cores, 905 MB", "3.11", samples=120, head="logistic")
            device = MqttTransport(endpoint, name, None, lambda event: None)
            state = DeviceState("alert", "b1", activity="fitting", release=3, why="canary_failed")
            for topic, message in ((topics.up(name, "state"), state), (topics.up(name, "meta"), can)):
                device.publish(Packet(topic, encode(message), retain=True))
            device.drain(10)
            device.close()
            registered_devices.record(db, [DeviceRecord("main", name, "alert")])
        registered_devices.quarantine(
            db, "main", f"{LONG}1", "3 reports rejected, the last one because of its norm"
        )
        registered_devices.score(db, "main", {f"{LONG}1": 22.8})
    command = ["fleet", "list", "--port", str(endpoint.port), "--home", str(tmp_path / "releases")]
    check(terminals.run(*command), printed(capsys, *command))


def test_the_result_of_a_simulation(
    terminals: Terminals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["simulate", "--rounds", "2", "--clients", "6", "--set", "engine=sequential"]
    screens = terminals.run(*command, "--runs", str(tmp_path / "runs"))
    check(screens, printed(capsys, *command, "--runs", str(tmp_path / "other")))
    for screen in screens.values():
        text = " ".join(screen.split())
        assert re.search(r"reaches a mean accuracy of \d+\.\d % over 6 simulated clients", text)
        assert "next: edge-fl plots " in text


def test_the_result_of_a_comparison(
    terminals: Terminals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", "--methods", "fedrep", "--rounds", "1", "--clients", "6", "--seeds", "1"]
    command += ["--out", str(tmp_path / "out")]
    assert main(command) == 0
    capsys.readouterr()
    saved = (tmp_path / "out" / "table.txt").read_text()
    for width, screen in terminals.run(*command).items():
        words = {word.removesuffix(":") for word in screen.split()}
        missing = {word for word in saved.split() if word.removesuffix(":") not in words} - {"-", "method"}
        assert not missing, f"{width} columns: no {missing}\n{screen}"
        assert "By validation accuracy" in screen or "highest validation accuracy" in screen
