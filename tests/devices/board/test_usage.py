"""What a device has used today is counted over restarts, and the budget that it uses up is named."""

from pathlib import Path

import pytest

from edge_fl.fleet.remote_settings import Budget
from edge_fl_devices.board import usage
from edge_fl_devices.board.usage import Meter, Usage, exceeded


def test_what_was_used_today_survives_a_restart_and_not_the_day(tmp_path: Path) -> None:
    sent, cpu_s, day = [100], [2.0], ["2026-01-01"]
    meter = Meter(tmp_path, lambda: sent[0], lambda: day[0], lambda: cpu_s[0])
    sent[0], cpu_s[0] = 300, 5.0
    assert meter.update() == Usage("2026-01-01", 200, 5.0) == usage.read(tmp_path)
    again = Meter(tmp_path, lambda: 50, lambda: day[0], lambda: 1.0)
    assert again.update() == Usage("2026-01-01", 200, 6.0)
    day[0] = "2026-01-02"
    assert again.update() == Usage("2026-01-02", 0, 0.0)


def test_the_totals_are_saved_after_some_traffic_and_at_the_end(tmp_path: Path) -> None:
    sent = [0]
    meter = Meter(tmp_path, lambda: sent[0], lambda: "2026-01-01", lambda: 0.0)
    meter.update()
    for total, last, saved in (
        (3_000_000, False, 0),
        (5_000_000, False, 5_000_000),
        (5_000_001, True, 5_000_001),
    ):
        sent[0] = total
        assert meter.update(last=last).bytes == total and usage.read(tmp_path).bytes == saved


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (Budget(), ""),
        (Budget(megabytes=3), "bytes 3.0 of 3 MB"),
        (Budget(cpu_s=90), "processor 100.0 of 90 s"),
        (Budget(kilojoules=0.2, watts=2.5), "energy (estimate) 0.2 of 0.2 kJ"),
    ],
)
def test_the_budget_that_is_used_up_is_named(budget: Budget, words: str) -> None:
    found = exceeded(Usage("d", 3_000_000, 100.0, watts=2.5), budget)
    assert words in found and bool(found) == bool(words)
