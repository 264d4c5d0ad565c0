"""Roll-outs that the dashboard requests have the same stages as those of the command line."""

from __future__ import annotations

from pathlib import Path

from edge_fl_server.dashboard import actions
from edge_fl_server.registry import Database, devices, rollouts
from edge_fl_server.registry.records import DeviceRecord
from edge_fl_server.release.rollout.stages import CAREFUL, MIN_STAGE, rank


def test_the_first_stage_of_a_small_fleet_is_widened(tmp_path: Path) -> None:
    db = Database.open(tmp_path / "registry.sqlite")
    names = [f"pi-{number:02d}" for number in range(12)]
    devices.record(db, [DeviceRecord("main", name, "ready", capability={"tier": "head"}) for name in names])
    rollouts.advance(db, rollouts.get(db, rollouts.begin(db, "main", 1)), state="completed")
    actions.start(db, "main", "2")
    requested = rollouts.current(db, "main")
    first, *_, last = requested.plan["stages"]
    assert (
        sum(rank(name, 2) < first for name in names)
        == MIN_STAGE
        > sum(rank(name, 2) < CAREFUL[0] for name in names)
    )
    assert (last, requested.previous) == (1.0, 1)
