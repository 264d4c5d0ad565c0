"""A roll-out in the registry: which devices count in a stage that some of them have left."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.recipes.recipe import RolloutConfig
from edge_fl_server.registry import Database, registered_devices, rollouts
from edge_fl_server.registry.tables import DeviceRecord
from edge_fl_server.release.rollout import stored_rollout
from edge_fl_server.release.rollout.gates import Outcome
from edge_fl_server.release.rollout.stored_rollout import StoredRollout

NAMES = ("pi-0", "pi-1", "pi-2")
PLAN = RolloutConfig(stages=(0.999, 1.0), stage_wait_s=60)


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    opened = Database.open(tmp_path / "registry.sqlite")
    registered_devices.record(
        opened, [DeviceRecord("main", name, capability={"tier": "head"}) for name in NAMES]
    )
    yield opened
    opened.close()


def reported(db: Database, *failed: str) -> StoredRollout:
    """The roll-out of release 1 after all devices have reported."""
    rollout = StoredRollout(db, "main")
    rollout.begin(1, PLAN, NAMES)
    for name in NAMES:
        rollout.add_outcome(name, rollout.assignment, Outcome("enospc" if name in failed else ""))
    return rollout


def ended(db: Database, rollout: StoredRollout, *present: str) -> str:
    """The state and reason after one step with these devices online."""
    with Journal(db, "main") as journal:
        rollout.advance(present, journal.blocked)
    record = rollouts.listed(db, "main")[0]
    return f"{record.state}: {record.reason}"


def test_devices_that_reported_and_left_still_count(db: Database) -> None:
    assert ended(db, reported(db), "pi-2") == "completed: 3 of 3 devices succeeded"
    failed = "paused: stage 1: 2 of 3 devices succeeded, 0 did not report"
    assert ended(db, reported(db, "pi-0"), "pi-1", "pi-2") == failed


def test_the_log_names_the_stage_of_a_pause_once(db: Database, caplog: pytest.LogCaptureFixture) -> None:
    ended(db, reported(db, "pi-0"), "pi-1", "pi-2")
    assert caplog.messages[-1] == (
        f"release 1: paused, stage 1 of {len(PLAN.stages)}, 2 of 3 devices succeeded, 0 did not report"
    )


def test_a_quarantined_device_does_not_count_in_the_stage(db: Database) -> None:
    registered_devices.quarantine(db, "main", "pi-0", "outliers")
    assert ended(db, reported(db, "pi-0"), "pi-1", "pi-2") == "completed: 2 of 2 devices succeeded"


def test_a_roll_out_that_is_resumed_pauses_again_while_the_reports_say_the_same(db: Database) -> None:
    rollout = StoredRollout(db, "main")
    rollout.begin(1, PLAN, NAMES)
    for name in NAMES:
        rollout.add_outcome(name, rollout.assignment, Outcome("", 5, 3, 0))
    why = "paused: stage 1: of 9 changed predictions on 3 devices 9 became wrong and 0 right"
    assert ended(db, rollout, *NAMES) == why
    rollouts.steer(db, 1, "running")
    assert ended(db, rollout, *NAMES) == why
    assert rollouts.get(db, 1).desired == "paused"  # the command that resumed it does not wait any longer


def test_a_stage_without_reports_names_the_devices_that_it_waits_for(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_rollout, "QUIET_S", 0.2)
    rollout = StoredRollout(db, "main")
    rollout.begin(1, PLAN, NAMES)
    rollout.add_outcome("pi-1", rollout.assignment, Outcome())
    assert ended(db, rollout, *NAMES) == "running: "
    time.sleep(0.3)
    waits = ended(db, rollout, *NAMES)
    seen = r"\(last message \d{4}-\d\d-\d\d \d\d:\d\d UTC\)"
    assert re.fullmatch(
        rf"running: 1 of 3 devices answered, waits until \d\d:\d\d UTC for pi-0 {seen}, pi-2 {seen}", waits
    )
    again = StoredRollout(db, "main")  # a restart
    again.add_outcome("pi-0", again.assignment, Outcome())
    again.add_outcome("pi-1", again.assignment, Outcome())
    assert ended(db, again, *NAMES) == waits
    time.sleep(0.3)
    assert re.search(rf"2 of 3 devices answered, waits until .* for pi-2 {seen}$", ended(db, again, *NAMES))
    registered_devices.set_revoked(db, "main", ["pi-2"])
    assert ended(db, again, "pi-0", "pi-1") == "completed: 2 of 2 devices succeeded"
