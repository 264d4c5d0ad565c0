"""`edge-fl fleet changes`: events, alerts, new devices and what people did since a time, newest first."""

import json
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from edge_fl.cli import main
from edge_fl_console import changes
from edge_fl_console.dashboard.pages import log
from edge_fl_server.registry import Database, registered_devices, rollouts, tables
from edge_fl_server.registry.tables import AlertRecord, DeviceRecord, ReleaseRecord


def test_what_changed_is_listed_once_with_who_did_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = tmp_path / "registry.sqlite"
    where = ["--database", str(registry)]
    old = (datetime.now(UTC) - timedelta(days=9)).isoformat(timespec="milliseconds")
    with closing(Database.open(registry)) as db:
        registered_devices.record(db, [DeviceRecord("main", f"pi-{number}", "ready") for number in range(5)])
        db.put(tables.devices, [msgspec.to_builtins(DeviceRecord("main", "old", "lost", first_seen_at=old))])
        rollouts.record_release(db, ReleaseRecord("main", 1, "run", 3, "fedavg", "0" * 64, 10))
        alert = AlertRecord(1, "main", "silent", "pi-0", "lost", int(datetime.now(UTC).timestamp()))
        db.put(tables.alerts, [msgspec.to_builtins(alert)])
    assert main(["fleet", "tag", "pi-0", "site=berlin", *where]) == 0
    capsys.readouterr()
    assert main(["fleet", "changes", "--since", "24h", "--format", "json", *where]) == 0
    said = capsys.readouterr()
    rows = [(row["kind"], row["subject"], row["text"].partition(" ")[0]) for row in json.loads(said.out)]
    assert ("tag", "pi-0: site=berlin", "by") in rows
    assert ("release", "release 1", "published,") in rows
    assert ("alert silent", "pi-0", "lost") in rows
    assert [row for row in rows if row[0] == "device"] == [("device", "pi-0, pi-1, pi-2 and 2 more", "seen")]
    assert "now 1 lost, 5 ready" in said.err
    assert [row["at"] for row in json.loads(said.out)] == sorted(
        (row["at"] for row in json.loads(said.out)), reverse=True
    )
    with closing(Database.existing(registry)) as db:
        events = {log.plain(event) for event in log.newest(db, "main")}
        assert events <= {
            row["text"] for row in changes.since(db, "main", datetime(2026, 1, 1, tzinfo=UTC)).rows
        }


def test_too_many_changes_are_those_of_the_newest_time_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No time is listed of which a part is missing."""
    monkeypatch.setattr(changes, "MOST", 3)
    where = ["--database", str(tmp_path / "registry.sqlite")]
    now = datetime.now(UTC)
    times = [(now - timedelta(hours=hours)).isoformat(timespec="milliseconds") for hours in range(1, 6)]
    with closing(Database.open(tmp_path / "registry.sqlite")) as db:
        for number, at in enumerate(reversed(times), 1):
            rollouts.record_release(db, ReleaseRecord("main", number, "run", 3, "fedavg", "0" * 64, 10, at))
        seen = [DeviceRecord("main", f"pi-{n}", "ready", first_seen_at=at) for n, at in enumerate(times)]
        db.put(tables.devices, [msgspec.to_builtins(each) for each in seen])
        found = changes.since(db, "main", now - timedelta(hours=9))
        assert found.complete.isoformat(timespec="milliseconds") == times[2]
        assert [(row["kind"], row["at"]) for row in found.rows] == [
            (kind, at) for at in times[:3] for kind in ("release", "device")
        ]
        start = datetime.fromisoformat(times[1])
        assert changes.since(db, "main", start).complete == start, "these are all"
    assert main(["fleet", "changes", "--since", "9h", *where]) == 0
    said = capsys.readouterr().err
    assert (
        f"6 changes since {times[2][:16].replace('T', ' ')} UTC" in said
        and "the dashboard's Log shows any day" in said
    )
