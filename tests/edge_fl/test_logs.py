"""JSON log lines contain run, round and device."""

import json
import logging
import subprocess
import sys

import pytest

from edge_fl import logs
from edge_fl.console.output import print_status

PROGRAM = """
import logging
from edge_fl import logs
from edge_fl.console.output import print_status
logs.configure(logs.LogFormat.JSON)
logs.set_context(run="toy-1", round=3)
logging.getLogger("server").warning("%s: refused\\nfor its norm", "pi-7", extra={"device": "pi-7"})
logs.set_context(round=None)
print_status("round 3/5")
"""


def test_a_line_names_run_round_and_device() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    warned, said = map(json.loads, done.stderr.splitlines())
    assert (warned["run"], warned["round"], warned["device"], warned["level"]) == (
        "toy-1",
        3,
        "pi-7",
        "warning",
    )
    assert warned["text"] == "pi-7: refused\nfor its norm"
    assert said["text"] == "round 3/5" and "device" not in said and "round" not in said


def test_text_stays_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(logs.FORMAT, raising=False)
    logs.configure(logs.LogFormat.TEXT)
    print_status("round 3/5")
    assert capsys.readouterr().err == "round 3/5\n"


def test_equal_lines_of_many_devices_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "GROUP_S", 60.0)
    log, lines = logging.getLogger("edge_fl.grouped"), logs.GroupedLines()
    log.addHandler(lines)
    try:
        for device in ("sim-2", "sim-0", "sim-2", "sim-1"):
            log.warning("%s: connection lost; connecting again", device)
        log.warning("sim-0: the broker denied a topic")
        assert not capsys.readouterr().err
        lines.flush()
    finally:
        log.removeHandler(lines)
    assert capsys.readouterr().err.splitlines() == [
        "sim-2 and 2 more: connection lost; connecting again",
        "sim-0: the broker denied a topic",
    ]


def test_a_line_of_many_devices_comes_without_a_later_one(capsys: pytest.CaptureFixture[str]) -> None:
    lines = logs.GroupedLines()
    lines.handle(logging.makeLogRecord({"msg": "sim-1: connection lost"}))
    timer = lines._timer
    assert timer is not None
    timer.join(60)
    assert capsys.readouterr().err == "sim-1: connection lost\n"
