"""The journal: screened updates in the registry, and quarantine that follows from them."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import select

from edge_fl.cli import main
from edge_fl_server.mqtt.connector import denied
from edge_fl_server.mqtt.journal import WRITE_INTERVAL_S, Journal
from edge_fl_server.registry import Database, registered_devices, registered_tags
from edge_fl_server.registry.tables import DeviceRecord, rejection_counts
from tests.devices.scripted import eventually
from tests.postgresql import Postgresql
from tests.rejections import rejections_of


@pytest.fixture
def journal():
    return Journal(fleet="main", quarantine_after=3)


def test_repeated_outliers_are_quarantined_by_name(journal):
    for round in (1, 2, 3):
        assert not journal.blocked("d2")
        scores = {"d1": 0.1, "d2": 8.0 + round}
        journal.record_screening("r1", round, scores, {"d2": f"norm {8 + round} times the median"})
    assert (journal.blocked("d1"), journal.blocked("d2")) == ("", "quarantined")
    d1, d2 = registered_devices.listed(journal.db, "main")
    assert (d1.outlier_score, d2.outlier_score) == (0.1, 11.0)
    assert d2.quarantine == "3 reports rejected, the last one because of outlier (norm 11 times the median)"
    found = [(one.device, one.round, one.reason) for one in rejections_of(journal.db, "main")]
    assert found == [("d2", 3, "outlier"), ("d2", 2, "outlier"), ("d2", 1, "outlier")]
    assert rejections_of(journal.db, "main")[0].detail == "norm 11 times the median"


def test_a_readmitted_device_starts_at_zero(journal):
    for round in (1, 2, 3):
        journal.record_screening("r1", round, {"d2": 2.0}, {"d2": "direction"})
    registered_devices.readmit(journal.db, "main", "d2")
    (d2,) = registered_devices.listed(journal.db, "main")
    assert (d2.blocked, d2.rejections, d2.outlier_score) == ("", 0, 0.0)


def test_a_flood_is_named_also_when_the_device_has_used_up_its_lines(caplog):
    with Journal(fleet="main") as journal:
        for number in range(50):
            journal.lines.write(logging.getLogger(__name__), logging.WARNING, "d1", "line %d", number)
        journal.record_excess("d1", 900, "4,000 messages in 10 s; 900 dropped")
        eventually(lambda: "d1: 4,000 messages in 10 s; 900 dropped" in caplog.messages)
    assert len([line for line in caplog.messages if line.startswith("line ")]) < 50


def test_rejections_that_end_nothing_are_stored_many_as_one_and_counted(tmp_path):
    with closing(Database.open(tmp_path / "registry.sqlite")) as db:
        with Journal(db, "main") as journal:
            for number in range(5000):
                journal.reject("d1", "r1", 1, f"report {number}", "stale_round")
                journal.reject("d2", "", 0, "rpt", "malformed", f"byte {number}")
        stored, counts = rejections_of(db, "main"), db_counts(db)
    assert counts == {"malformed": 5000, "stale_round": 5000}
    assert (
        len(stored) < 300
    )  # some by the journal's thread, none by the caller's: that would be the newest 200 of each device
    assert [one.id for one in stored if one.device == "d1"][:3] == [
        "report 4999",
        "report 4998",
        "report 4997",
    ]
    assert [one.detail for one in stored if one.device == "d2"][:2] == ["byte 4999", "byte 4998"]
    assert not journal.blocked("d1") and not journal.blocked("d2")


def db_counts(db: Database) -> dict[str, int]:
    with db.reading() as connection:
        rows = connection.execute(select(rejection_counts.c.reason, rejection_counts.c.count.label("count_")))
        return {row.reason: row.count_ for row in rows}


def test_a_registry_that_goes_away_and_comes_back_is_logged_once_each_way(
    new_postgresql_database: Callable[[], str],
    postgresql: Postgresql,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(Database.open(new_postgresql_database())) as db, Journal(db, "main") as journal:
        journal.begin(1)
        postgresql.stop()
        try:
            journal.record_device(DeviceRecord("main", "pi-1", "ready"))
            journal.reject("pi-1", "", 0, "rpt", "malformed")
            eventually(lambda: ours(caplog))
            journal.reject("pi-1", "", 0, "rpt", "malformed")
            turn = threading.Event()
            journal.on_written.append(turn.set)  # called after a write that succeeds
            time.sleep(3 * WRITE_INTERVAL_S)
            assert len(ours(caplog)) == 1 and not turn.is_set()
        finally:
            postgresql.start()
        eventually(turn.is_set)
        eventually(lambda: len(ours(caplog)) > 1)
        eventually(lambda: registered_devices.get(db, "main", "pi-1"))
        eventually(lambda: db_counts(db) == {"malformed": 2})
        lost, back = ours(caplog)
    assert lost.startswith("fleet 'main': registry: ") and lost.endswith("are kept until it works again")
    assert back == "fleet 'main': works again"


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name.startswith("edge_fl_server")]


def test_tags_given_at_enrolment_reach_the_registry_of_a_running_server(tmp_path: Path) -> None:
    def enrol(*arguments: str) -> None:
        assert main(["fleet", "enrol", *arguments, "--identities", str(tmp_path)]) == 0

    enrol("pi-01", "--tag", "site=berlin", "--tag", "line=2")
    db = Database.open()
    with Journal(db, "main", denied=denied(tmp_path / "server")):
        enrol("--baked", "pi-02", "--tag", "site=paris")
        expected = {"pi-01": {"line": "2", "site": "berlin"}, "pi-02": {"site": "paris"}}
        until = time.monotonic() + 90
        while registered_tags.of_devices(db, "main") != expected and time.monotonic() < until:
            time.sleep(0.05)
    assert registered_tags.of_devices(db, "main") == expected


@pytest.mark.parametrize("tag", ["site", "tier=full", "site-"])
def test_a_wrong_tag_enrols_no_device(tag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "enrol", "pi-01", "--tag", tag, "--identities", str(tmp_path / "ca")]) == 4
    assert "expected" in capsys.readouterr().err and not (tmp_path / "ca").exists()
