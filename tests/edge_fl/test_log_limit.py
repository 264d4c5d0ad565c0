"""The lines that one sender can cause in a log."""

import logging

import pytest

from edge_fl import logs
from edge_fl.logs import AT_ONCE, EVERY_S, LogLimit
from tests.clock import Clock

log = logging.getLogger("tests.log_limit")


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def write(lines: LogLimit, sender: str, times: int, level: int = logging.WARNING) -> None:
    for number in range(times):
        lines.write(log, level, sender, "%s: line %d", sender, number)


def test_ten_lines_at_once_then_three_a_minute_with_the_number_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    lines = LogLimit(clock)
    write(lines, "pi-1", 280)
    assert [record.getMessage() for record in caplog.records] == [
        f"pi-1: line {number}" for number in range(AT_ONCE)
    ]
    assert {record.device for record in caplog.records} == {"pi-1"}  # type: ignore[attr-defined]
    caplog.clear()
    for _ in range(60):  # a minute of 280 lines a second
        clock.now_s += 1
        write(lines, "pi-1", 280)
    assert [record.getMessage() for record in caplog.records] == [
        "pi-1: line 0 (5,590 more lines of pi-1 were left out)",
        *["pi-1: line 0 (5,599 more lines of pi-1 were left out)"] * 2,
    ]


def test_a_quiet_sender_is_not_limited_and_others_are_not_affected(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    lines = LogLimit(clock)
    write(lines, "loud", 1000)
    caplog.clear()
    for _ in range(50):
        clock.now_s += EVERY_S
        write(lines, "pi-2", 1)
    assert len(caplog.records) == 50 and "left out" not in caplog.text
    clock.now_s += AT_ONCE * EVERY_S
    caplog.clear()
    write(lines, "loud", AT_ONCE + 1)
    assert len(caplog.records) == AT_ONCE and "(990 more lines of loud" in caplog.text


def test_lines_below_the_level_of_the_log_cost_nothing(caplog: pytest.LogCaptureFixture) -> None:
    lines = LogLimit()
    write(lines, "pi-1", 100, logging.DEBUG)
    write(lines, "pi-1", AT_ONCE)
    assert len(caplog.records) == AT_ONCE


def test_names_without_end_share_one_limit_and_little_memory(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_SENDERS", 100)
    clock = Clock()
    lines = LogLimit(clock)
    for number in range(1000):
        write(lines, f"name-{number}", 1)
    assert len(caplog.records) == 100 + AT_ONCE and len(lines._usage) <= 101
    clock.now_s += AT_ONCE * EVERY_S
    caplog.clear()
    write(lines, "name-2000", 1)  # the others have been silent
    assert [record.getMessage() for record in caplog.records] == ["name-2000: line 0"] and len(
        lines._usage
    ) <= 2
