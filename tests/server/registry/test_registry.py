"""The registry: every value survives, nothing is counted twice, and final states do not change."""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect

from edge_fl.cli import main
from edge_fl.errors import ConfigError, ConnectError, RunError
from edge_fl.wire.messages import Report
from edge_fl_server.registry import Database, registered_devices, registered_reports, rollouts, runs
from edge_fl_server.registry.tables import (
    DeviceRecord,
    RejectionRecord,
    ReleaseRecord,
    ReportRecord,
    RequestRecord,
    RoundRecord,
    RunRecord,
    metadata,
)
from tests.rejections import rejections_of

RUN = RunRecord("r1", "main", "fedavg", "digits", "fleet", 3, "runs/r1")


@pytest.fixture
def db(database_url):
    with_tables = Database.open(database_url)
    yield with_tables
    with_tables.close()


def report(id="r1-1", **fields):
    return Report(id, "update", "b1", 20, {"loss": 0.5}, **fields)


def test_the_migrations_make_the_tables_that_the_code_uses(db):
    with db.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        found = inspect(connection)
        for table in metadata.sorted_tables:
            key = [column.name for column in table.primary_key]
            assert found.get_pk_constraint(table.name)["constrained_columns"] == key


def test_servers_that_start_at_the_same_time_create_the_tables_once(new_postgresql_database):
    url = new_postgresql_database()
    with ThreadPoolExecutor(4) as executor:
        opened = list(executor.map(Database.open, [url] * 4))
    assert [runs.listed(one) for one in opened] == [[]] * 4
    for one in opened:
        one.close()


def test_opening_again_keeps_everything(tmp_path):
    path = tmp_path / "server" / "registry.sqlite"
    first = Database.open(path)
    runs.begin(first, RUN)
    first.close()
    assert [run.run for run in runs.listed(Database.open(path))] == ["r1"]
    assert sqlite3.connect(path).execute("PRAGMA journal_mode").fetchone() == ("wal",)


@pytest.mark.parametrize("opened", [Database.open, Database.existing])
@pytest.mark.parametrize("version", ["0013", "v9"])  # of a development version, of a later release
def test_a_registry_of_another_version_is_named_and_stays_as_it_is(tmp_path, version, opened):
    path = tmp_path / "registry.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES (?)", (version,))
        connection.execute("CREATE TABLE devices (device TEXT)")
        connection.execute("INSERT INTO devices VALUES ('pi-07')")
        before = list(connection.iterdump())
    expected = rf"{path}: tables of version '{version}', expected 'v1'.*nothing was changed; open it with"
    with pytest.raises(ConfigError, match=expected):
        opened(path)
    with sqlite3.connect(path) as connection:
        assert list(connection.iterdump()) == before


def test_tables_of_another_program_are_not_touched(tmp_path):
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE runs (distance_km REAL)")
        before = list(connection.iterdump())
    with pytest.raises(ConfigError, match=r"other.sqlite: table runs already exists; expected"):
        Database.open(path)
    with sqlite3.connect(path) as connection:
        assert list(connection.iterdump()) == before


def test_messages_of_a_device_do_not_change_its_quarantine(db):
    registered_devices.record(
        db, [DeviceRecord("main", "d1", "ready", capability={"tier": "full"}), DeviceRecord("main", "d2")]
    )
    registered_devices.quarantine(db, "main", "d1", "three reports rejected")
    registered_devices.set_revoked(db, "main", {"d9"})  # never seen
    registered_devices.record(db, [DeviceRecord("main", "d1", "alert", why="enospc", seen_sequence=7)])
    d1, d2, d9 = registered_devices.listed(db, "main")
    assert (d1.status, d1.why, d1.seen_sequence, d1.quarantine) == (
        "alert",
        "enospc",
        7,
        "three reports rejected",
    )
    assert (d1.blocked, d2.blocked, d9.blocked) == ("quarantined", "", "revoked")
    assert d1.first_seen_at <= d1.seen_at
    assert registered_devices.blocked(db, "main") == {"d1": "quarantined", "d9": "revoked"}
    registered_devices.readmit(db, "main", "d1")
    assert registered_devices.blocked(db, "main") == {"d9": "revoked"}
    assert registered_devices.listed(db, "other") == []


def test_a_run_ends_once(db):
    runs.begin(db, RUN)
    assert runs.end(db, "r1", "failed", "no quorum")
    assert not runs.end(db, "r1", "completed")
    found = runs.get(db, "r1")
    assert (found.state, found.reason) == ("failed", "no quorum")
    assert found.created_at <= found.ended_at
    runs.begin(db, found)  # resumed
    assert runs.get(db, "r1").state == "running"
    assert runs.get(db, "r1").created_at == found.created_at


def test_a_run_whose_server_died_was_stopped_when_the_next_begins(db):
    runs.begin(db, RUN)
    runs.begin(db, RunRecord("r2", "main", "fedavg", "digits", "fleet", 3, "runs/r2"))
    runs.begin(db, RunRecord("o1", "other", "fedavg", "digits", "fleet", 3, "runs/o1"))
    assert {run.run: run.state for run in runs.listed(db)} == {
        "r1": "stopped",
        "r2": "running",
        "o1": "running",
    }
    assert [run.run for run in runs.listed(db, "other")] == ["o1"]


def test_a_running_run_can_be_requested_to_stop(db):
    runs.begin(db, RUN)
    assert runs.stop(db, "r1")
    assert runs.get(db, "r1").desired == "stopped"
    runs.end(db, "r1", "stopped")
    assert not runs.stop(db, "r1")


def test_a_round_that_is_repeated_replaces_itself(db):
    runs.record_round(db, RoundRecord("r1", 1, selected=3, responded=2, seconds=1.5))
    runs.record_round(db, RoundRecord("r1", 1, selected=3, responded=3, seconds=2.5, metrics={"acc": None}))
    (found,) = runs.rounds_of(db, "r1")
    assert (found.responded, found.metrics) == (3, {"acc": None})


def test_a_request_ends_in_exactly_one_state(db):
    runs.add_requests(
        db, [RequestRecord("main", device, "r1-1", "r1", 1, "train") for device in ("d1", "d2", "d3")]
    )
    assert runs.settle_requests(db, "main", "r1-1", "succeeded", device="d1") == 1
    assert runs.settle_requests(db, "main", "r1-1", "rejected", "tensors", device="d2") == 1
    assert runs.settle_requests(db, "main", "r1-1", "timed_out", "deadline") == 1
    assert runs.settle_requests(db, "main", "r1-1", "failed", device="d1") == 0
    assert {request.device: request.state for request in runs.requests_of(db, "r1", 1)} == {
        "d1": "succeeded",
        "d2": "rejected",
        "d3": "timed_out",
    }


def test_a_report_counts_once_and_is_known_after_a_restart(db):
    record = registered_reports.record_of("main", "d1", "r1", 1, report(bytes_up=9))
    assert not registered_reports.is_accepted(db, "main", "d1", "r1-1")
    assert registered_reports.accept(db, record)
    assert not registered_reports.accept(db, record)
    assert registered_reports.is_accepted(db, "main", "d1", "r1-1")
    assert not registered_reports.is_accepted(db, "main", "d2", "r1-1")
    (found,) = registered_reports.of_run(db, "r1", 1)
    assert (found.metrics, found.bytes_up, found.before) == ({"loss": 0.5}, 9, None)


def test_only_one_of_many_threads_accepts_a_report(db):
    record, won = registered_reports.record_of("main", "d1", "r1", 1, report()), []
    threads = [
        threading.Thread(target=lambda: won.append(registered_reports.accept(db, record)), daemon=True)
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(won) == [False] * 7 + [True]


def test_rejected_reports_put_a_device_in_quarantine(db):
    rejection = RejectionRecord("main", "d1", "r1-1", "r1", 1, "tensors", "extractor.weight: NaN")
    assert [registered_reports.reject(db, rejection, quarantine_after=3) for _ in range(4)] == [
        "",
        "",
        "3 reports rejected, the last one because of tensors (extractor.weight: NaN)",
        "",
    ]
    assert registered_devices.blocked(db, "main") == {"d1": "quarantined"}
    found = rejections_of(db, "main", device="d1")
    assert [one.number for one in found] == [4, 3, 2, 1]
    assert found[0].detail == "extractor.weight: NaN"


def test_outlier_scores_survive_messages_of_the_device_until_it_is_readmitted(db):
    registered_devices.record(
        db, [DeviceRecord("main", "d1", "ready", seen_sequence=3), DeviceRecord("main", "d2")]
    )
    registered_devices.score(db, "main", {"d1": 0.25, "d9": 1.5})  # d9 was never seen
    registered_devices.score(db, "main", {"d1": float("inf"), "d2": float("nan")})
    registered_devices.record(db, [DeviceRecord("main", "d1", "alert", seen_sequence=4)])
    found = {
        one.device: (one.status, one.seen_sequence, one.outlier_score)
        for one in registered_devices.listed(db, "main")
    }
    assert found == {"d1": ("alert", 4, 1e6), "d2": ("unknown", 0, 1e6), "d9": ("unknown", 0, 1.5)}
    registered_devices.readmit(db, "main", "d1")
    assert registered_devices.get(db, "main", "d1").outlier_score == 0
    assert registered_devices.get(db, "main", "d1").status == "alert"


def test_the_newest_accuracy_of_each_device_is_known(db, monkeypatch):
    moments = iter(f"2026-11-20T14:03:0{number}.000+00:00" for number in range(4))
    monkeypatch.setattr(registered_reports, "now", lambda: next(moments))
    for id, device, after in (("a", "d1", 0.9), ("b", "d1", 0.8), ("c", "d2", None), ("d", "d1", None)):
        registered_reports.accept(db, ReportRecord("main", device, id, "r1", 1, "head", 5, after=after))
    assert {name: one.after for name, one in registered_reports.newest_measured(db, "main").items()} == {
        "d1": 0.8
    }
    newest = registered_reports.newest_heads(db, "main")  # also of a head that is not measured
    assert {name: (found.id, found.after) for name, found in newest.items()} == {
        "d1": ("d", None),
        "d2": ("c", None),
    }


def test_releases_are_listed_newest_first(db):
    for number in (1, 2):
        rollouts.record_release(db, ReleaseRecord("main", number, "r1", number, "fedavg", "0" * 64, 100))
    assert [found.release for found in rollouts.releases_of(db, "main")] == [2, 1]


def test_any_process_steers_a_rollout_and_only_the_latest_reader_advances_it(db):
    number = rollouts.begin(db, "main", 2, previous=1, plan={"stages": [0.1, 1.0]})
    seen = rollouts.current(db, "main")
    assert (seen.number, seen.plan, seen.state) == (number, {"stages": [0.1, 1.0]}, "running")
    rollouts.steer(db, number, "paused")
    assert rollouts.advance(db, seen, stage=1) is None  # it did not see the pause
    seen = rollouts.get(db, number)
    seen = rollouts.advance(db, seen, state=seen.desired)
    assert rollouts.get(db, number) == seen
    assert rollouts.advance(db, seen, state="completed", stage=2, reason="all devices")
    assert rollouts.current(db, "main") is None
    assert [found.state for found in rollouts.listed(db, "main")] == ["completed"]


def test_a_database_that_cannot_be_opened_is_a_config_error(tmp_path):
    (tmp_path / "registry.sqlite").write_bytes(b"no database at all, but long enough to be read as one" * 40)
    with pytest.raises(ConfigError, match="not a database"):
        Database.open(tmp_path / "registry.sqlite")
    with pytest.raises(ConfigError, match="expected a path, sqlite:// or postgresql://"):
        Database.open("mysql://root:secret@localhost/x")


@pytest.mark.parametrize("opened", [Database.open, Database.existing])
def test_a_postgresql_that_cannot_be_reached_is_an_error_of_the_connection(opened):
    with pytest.raises(
        ConnectError, match=r"registry postgresql.*expected a PostgreSQL that runs"
    ) as refused:
        opened("postgresql://somebody:secret@127.0.0.1:1/none")
    assert "secret" not in str(refused.value) and refused.value.exit_code == 2


def test_a_command_without_its_postgresql_ends_with_2_and_words(capsys):
    url = "postgresql://somebody@127.0.0.1:1/none"
    assert main(["fleet", "admit", "pi-1", "--database", url]) == 2
    assert main(["server", "up", "--database", url]) == 2
    said = capsys.readouterr().err
    assert said.count("expected a PostgreSQL that runs there") == 2 and "Traceback" not in said


def test_a_user_or_database_that_postgresql_does_not_have_is_an_error_of_the_connection(postgresql):
    there = postgresql.url("there")
    with pytest.raises(ConnectError, match="does not exist"):
        Database.open(there.replace("/there", "/nowhere"))
    with pytest.raises(ConnectError, match="does not exist"):
        Database.open(there.replace("tester@", "nobody-known@"))


def test_a_full_disk_is_a_run_error(db):
    with pytest.raises(RunError, match="not acknowledged"), db.writing() as connection:
        connection.exec_driver_sql("INSERT INTO nowhere VALUES (1)")
