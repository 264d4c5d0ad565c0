"""A fleet that was rolled back: it is recorded who asked for it, and every comparison names the releases that it compares."""

import asyncio
import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
from nicegui import Client, ui
from nicegui.page import page as page_of
from nicegui.slot import Slot

from edge_fl import metrics
from edge_fl.wire.roles import Person
from edge_fl_console.dashboard import actions, parts
from edge_fl_console.dashboard.context import PageContext
from edge_fl_console.dashboard.live import PageBoard
from edge_fl_console.dashboard.pages import fleet, log, overview, releases
from edge_fl_console.dashboard.pages.fleet import FleetQuery
from edge_fl_server.registry import Database, audit, registered_devices, registered_reports, rollouts, runs
from edge_fl_server.registry import rollouts as released
from edge_fl_server.registry.tables import DeviceRecord, ReleaseRecord, ReportRecord, RolloutRecord, RunRecord
from edge_fl_server.release import compare
from edge_fl_server.runs import round_metrics
from edge_fl_server.runs.round_metrics import RoundMetrics
from tests.browsing import run_coroutine

ANNA = Person("anna", "token", frozenset({"releaser"}))
ACCURACIES = {"pi-0": (0.93, 0.96, 0.97), "pi-1": (0.94, 0.96, 0.95)}
"""Device -> its accuracy on releases 1, 2 and 3."""


def completed(db: Database, number: int) -> None:
    record = rollouts.get(db, number)
    assert record
    rollouts.advance(db, record, state="completed", reason="2 of 2 devices succeeded")


def reported(db: Database, device: str, id: str, release: int, before: float | None, after: float) -> None:
    values = (9, {}, before, after, release)
    assert registered_reports.accept(db, ReportRecord("main", device, id, "toy", release, "head", *values))


@pytest.fixture
def db() -> Database:
    """Three releases, of which the fleet serves the last."""
    db = Database.open()
    for release in (1, 2, 3):
        released.record_release(db, ReleaseRecord("main", release, "toy", release, "fedrep", "0" * 64, 100))
        number = rollouts.begin(db, "main", release, previous=release - 1)
        for device, found in ACCURACIES.items():
            before = found[release - 2] if release > 1 else None
            reported(db, device, f"rel-{release}", release, before, found[release - 1])
        completed(db, number)
    able = {"tier": "head"}
    registered_devices.record(
        db, [DeviceRecord("main", device, "ready", release=2, capability=able) for device in ACCURACIES]
    )
    return db


def roll_back(db: Database) -> RolloutRecord:
    """From release 3 to release 2, as from the page of releases; devices compare release 2 with release 3."""
    with audit.acting(db, "main", ANNA, "start", "2"):
        actions.start(PageContext(db, "main"), "2")
    record = rollouts.current(db, "main")
    assert record
    for device, (_, after, before) in ACCURACIES.items():
        reported(db, device, f"rel-2-again-{record.number}", 2, before, after)
    completed(db, record.number)
    return record


def test_a_release_is_compared_with_the_one_that_its_numbers_were_measured_against(db: Database) -> None:
    shown = overview.changed(overview.read(db, "main"))
    assert "release 3 compared with release 2" in shown and "96.0 → 96.0" in shown
    roll_back(db)
    change = overview.read(db, "main").change
    assert (change.release, change.other, change.rolled_back) == (2, 3, True)
    assert (change.found.before, change.found.after) == (pytest.approx(0.96), pytest.approx(0.96))
    reported(db, "pi-0", "refit", 2, 0.96, 0.94)
    page = overview.read(db, "main")
    assert page.change.found and page.change.found.mean == pytest.approx(-0.01)
    shown = overview.changed(page)
    assert "release 2 compared with release 3" in shown and "96.0 → 95.0" in shown
    assert "rolled back from release 3 to 2, last accuracy on each" in shown and "93.5" not in shown
    shown = releases.current(releases.read(db, "main"))
    assert "Release 3 → 2, last accuracy on each" in shown and "96.0 → 95.0" in shown and "93.5" not in shown
    (second,) = (row for row in releases.read(db, "main").releases.values() if row.record.release == 2)
    (cells,) = parts.cells(releases.RELEASES, [second])
    assert "release 1:" in cells["reports.gain"] and "93.5 → 96.0" in cells["reports.gain"]


def test_a_roll_back_is_recorded_with_who_asked_for_it(db: Database) -> None:
    roll_back(db)
    page = releases.read(db, "main")
    newest, *others = parts.cells(releases.ROLLOUTS, page.rollouts)
    assert (newest["asked_by"], newest["record.explanation"]) == (
        "anna",
        "rolled back from release 3 to 2; 2 of 2 devices succeeded",
    )
    assert [row["asked_by"] for row in others] == ["", "", ""]
    assert [bool(row.withdrawn) for row in page.releases.values()] == [True, False, False]
    told = [event.text for event in log.newest(db, "main") if event.kind == "roll-out"]
    assert told[0] == "rolled back from release 3 to 2: 2 of 2 devices succeeded; asked by anna"
    assert told[1] == "completed: 2 of 2 devices succeeded"
    completed(db, rollouts.begin(db, "main", 3, previous=2))
    page = releases.read(db, "main")
    assert not any(row.withdrawn for row in page.releases.values())
    assert "release 3 compared with release 2" in overview.changed(overview.read(db, "main"))


def test_a_roll_out_that_is_rolled_back_before_its_end_says_from_where_to_where(db: Database) -> None:
    number = rollouts.begin(db, "main", 4, previous=3)
    with audit.acting(db, "main", ANNA, "rollback", str(number)):
        actions.ACTIONS["rollback"].do(PageContext(db, "main"), str(number))
    record = rollouts.get(db, number)
    assert record
    rollouts.advance(db, record, state="rolled_back", reason="by hand")
    (newest, *_) = log.newest(db, "main")
    assert newest.text == "rolled back from release 4 to 3: by hand; asked by anna"
    change = overview.read(db, "main").change
    assert (change.release, change.other, change.rolled_back, change.found) == (3, 4, True, None)
    shown = overview.changed(overview.read(db, "main"))
    assert "Rolled back from release 4 to 3. Not measured yet" in shown


def test_a_device_that_came_back_shows_the_accuracy_on_the_release_that_it_left(db: Database) -> None:
    roll_back(db)
    rows = fleet.read(db, "main", FleetQuery()).rows
    assert {row.device: (row.before, row.after) for row in rows} == {
        "pi-0": (0.97, 0.96),
        "pi-1": (0.95, 0.96),
    }
    compared = compare.releases(db, "main", 3, 2)
    assert not compared.same_images and (compared.before, compared.after) == (
        {"pi-0": 0.97, "pi-1": 0.95},
        {"pi-0": 0.96, "pi-1": 0.96},
    )
    assert compare.releases(db, "main", 1, 2).before == {"pi-0": 0.93, "pi-1": 0.94}, (
        "as before the roll-back"
    )


def test_a_simulated_local_only_baseline_of_the_run_is_shown(db: Database, tmp_path: Path) -> None:
    runs.begin(db, RunRecord("toy", "main", "fedrep", "digits", "fleet", 3, str(tmp_path)))
    registered_devices.record(db, [DeviceRecord("main", "full", "ready", capability={"tier": "full"})])
    own = {metrics.PERSONAL_AFTER: 0.9}
    registered_reports.accept(db, ReportRecord("main", "full", "p", "toy", 3, "personal", 9, own))
    assert "Local-only baseline: not measured" in overview.gained(overview.read(db, "main"))
    local = {"full": 0.8, "pi-0": 0.7, "pi-1": 0.6}
    clients = {name: {**own, metrics.LOCAL_ONLY: accuracy} for name, accuracy in local.items()}
    line = RoundMetrics(round=3, final=True, clients=clients)
    (tmp_path / round_metrics.FILE).write_bytes(round_metrics.encode(line))
    runs.end(db, "toy", "completed", "")
    page = overview.read(db, "main")
    assert page.full and page.full.heads
    assert [(gain.baseline, gain.simulated) for gain in page.full.gains] == [(metrics.LOCAL_ONLY, True)]
    assert (page.full.heads.found.before, page.full.heads.found.n) == (pytest.approx(0.65), 2)
    shown = overview.gained(page)
    assert "Head-only devices: personal models compared with" in shown and "(simulated)" in shown
    assert "not measured" not in shown and "release" not in shown


def test_a_dialog_whose_tab_is_closed_ends_without_an_error(db: Database) -> None:
    async def press(slot: Slot, board: PageBoard) -> None:
        with slot:  # as NiceGUI calls handlers: it keeps no page alive
            await board._pressed(SimpleNamespace(args="start:2"))

    async def closed() -> None:
        client = Client(page_of("/"))
        task = asyncio.create_task(press(client.content.default_slot, PageBoard(PageContext(db, "main"))))
        while not any(isinstance(element, ui.dialog) for element in client.elements.values()):
            assert not task.done(), task
            await asyncio.sleep(0.01)
        client.delete()
        del client
        gc.collect()
        await asyncio.wait_for(task, 60)

    run_coroutine(closed())
    assert rollouts.current(db, "main") is None
