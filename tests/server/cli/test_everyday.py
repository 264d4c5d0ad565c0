"""Everyday questions by command: the worst device and why, one release or another, how much was sent, and a backup."""

import json
import tarfile
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edge_fl.cli import main
from edge_fl.console.output import Format, show_table
from edge_fl.console.units import MAX_PROSE, parse_moment
from edge_fl.errors import InputError
from edge_fl.metrics import PERSONAL_AFTER, TEST_SAMPLES
from edge_fl.wire.messages import Capability, DeviceState, encode
from edge_fl.wire.transport import Packet
from edge_fl_server.mqtt.connector import LeaseLimits
from edge_fl_server.mqtt.devices import device_list
from edge_fl_server.registry import Database, registered_reports, rollouts
from edge_fl_server.registry.tables import DeviceRecord, ReleaseRecord, ReportRecord, devices
from edge_fl_server.release import compare
from edge_fl_server.release.repository import Repository

NOW = datetime(2026, 11, 28, 14, 30, tzinfo=UTC)
QUICK = LeaseLimits(settle_s=0.2)


def report(db: Database, device: str, release: int, after: float | None, before: float | None = None) -> None:
    record = ReportRecord(
        "main", device, f"{device}-{release}-{after}", "run", 1, "head", 9, before=before, after=after,
        release=release, head="svm", bytes_up=100 * release, bytes_down=1000,
    )  # fmt: skip
    assert registered_reports.accept(db, record)


def released(db: Database, *numbers: int) -> None:
    """Releases, each rolled out to the whole fleet after the one before."""
    for number in numbers:
        rollouts.record_release(db, ReleaseRecord("main", number, "run", 1, "fedavg", "0" * 64, 10))
        record = rollouts.get(db, rollouts.begin(db, "main", number, previous=number - 1))
        assert record
        rollouts.advance(db, record, state="completed")


@pytest.fixture
def place(tmp_path: Path) -> list[str]:
    """The options of a registry with two releases on three devices."""
    registry = tmp_path / "server" / "registry.sqlite"
    with closing(Database.open(registry)) as db:
        released(db, 1, 2)
        serving = [
            DeviceRecord("main", name, "ready", release=2, capability={"tier": "head"}) for name in "abc"
        ]
        db.put(devices, [msgspec.to_builtins(each) for each in serving])
        for name, before, after in (("a", 0.9, 0.8), ("b", 0.5, 0.8), ("c", 0.6, 0.9)):
            report(db, name, 1, before)
            report(db, name, 2, after, before)
        report(db, "d", 1, 0.7)  # not on release 2
    return ["--home", str(tmp_path / "releases")]


def rows(capsys: pytest.CaptureFixture[str], *command: str) -> tuple[list[dict[str, Any]], str]:
    capsys.readouterr()
    assert main([*command, "--format", "json"]) == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def test_the_list_is_sorted_by_a_column_and_says_why_a_device_may_be_bad(stage: Any) -> None:
    db = Database.open()
    released(db, 1, 2)
    few = "120 pictures come from 4 scenes: the accuracy is an estimate from few scenes"
    states = {
        "a": (DeviceState("ready", "b1", release=2), Capability("head", "x", "3", agent="0.10.0"), 0.9),
        "b": (
            DeviceState("ready", "b1", release=1),
            Capability("head", "x", "3", agent="0.9.0", notes=["head: x", "512 MB", few], drift=1.0),
            0.8,
        ),
        "c": (DeviceState("lost", "b1", release=2, why="enospc"), Capability("head", "x", "3"), None),
    }
    transport = stage.connect("devices", None, lambda event: None)
    for name, (state, capability, after) in states.items():
        transport.publish(Packet(stage.topics.up(name, "state"), encode(state), retain=True))
        transport.publish(Packet(stage.topics.up(name, "meta"), encode(capability), retain=True))
        if after:
            registered_reports.accept(
                db,
                ReportRecord(
                    "main",
                    name,
                    "r",
                    "run",
                    1,
                    "head",
                    9,
                    metrics={PERSONAL_AFTER: after, TEST_SAMPLES: 30.0},
                    head="svm",
                    after=after,
                ),
            )
    transport.drain(60)

    def sorted_by(column: str) -> list[dict[str, object]]:
        return device_list.devices(stage.connect, "main", db, QUICK, sort=column).rows

    worst, best, unmeasured = sorted_by("accuracy")
    assert [row["device"] for row in (worst, best, unmeasured)] == ["b", "a", "c"]
    assert (
        worst["reason"]
        == f"its samples have changed since its head was fitted; it serves release 1, the fleet 2; {few}"
    )
    assert worst["measured"] == "head: x; 512 MB" and not best["reason"]
    assert str(unmeasured["reason"]).startswith("lost: not connected; enospc: ")
    assert [row["device"] for row in sorted_by("agent")] == ["b", "a", "c"]
    with pytest.raises(InputError, match=r"--sort acuracy: no column \(did you mean 'accuracy'\?\)"):
        sorted_by("acuracy")
    transport.close()


def test_one_device_does_not_make_the_lines_of_all_wide(
    stage: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    db, text = Database.open(), "x" * 1990
    states = {
        "pi-1": (DeviceState("ready", "b1"), Capability("head", "x", "3", agent="0.9.0")),
        "pi-2": (
            DeviceState("ready", "b1", why=text),
            Capability("head", "m" * 200, "3", agent="9" * 200, head=text, notes=[text] * 64),
        ),
    }
    transport = stage.connect("devices", None, lambda event: None)
    for name, (state, capability) in states.items():
        transport.publish(Packet(stage.topics.up(name, "state"), encode(state), retain=True))
        transport.publish(Packet(stage.topics.up(name, "meta"), encode(capability), retain=True))
    transport.drain(60)
    registered_reports.accept(db, ReportRecord("main", "pi-2", "r", "run", 1, "head", 9, head=text))
    listed = device_list.devices(stage.connect, "main", db, QUICK).rows
    show_table(listed, device_list.SHOWN)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and max(map(len, lines)) < 2200
    assert all(len(word) <= MAX_PROSE for line in lines for word in line.split("  "))
    show_table(listed, device_list.COLUMNS, Format.JSON)
    (whole,) = [row for row in json.loads(capsys.readouterr().out) if row["device"] == "pi-2"]
    assert (whole["why"], whole["configured"], whole["reason"].count(text)) == (text, text, 63)
    transport.close()


def test_two_releases_are_compared_on_the_same_devices_as_on_the_dashboard(
    place: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, said = rows(capsys, "release", "compare", "1", "2", *place)
    assert [(row["device"], round(row["change"], 2)) for row in found] == [
        ("a", -0.1),
        ("b", 0.3),
        ("c", 0.3),
    ]
    assert said.startswith(
        "release 2 compared with 1: +16.7 points (95 % CI -40.7 to +74.0, n = 3), 66.7 % -> 83.3 %"
    )
    assert said.strip().endswith("on the same samples: not distinguishable from chance")
    assert rows(capsys, "release", "compare", *place) == (found, said), "by default the one in service"
    with closing(Database.existing(tmp_path / "server" / "registry.sqlite")) as db:
        rollouts.begin(db, "main", 1, previous=2)
        assert (compare.releases(db, "main").old, compare.releases(db, "main").new) == (2, 1), (
            "the one on its way"
        )
    backwards, said = rows(capsys, "release", "compare", "2", "1", *place)
    assert len(backwards) == 3 and "newest accuracy on each" in said
    assert main(["release", "compare", "1", "7", *place]) == 4
    assert "release 7; expected two of 1, 2; nothing was compared" in capsys.readouterr().err


def test_what_was_sent_by_device_and_in_all(place: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found, said = rows(capsys, "fleet", "traffic", *place)
    assert [(row["device"], row["reports"], row["up"]) for row in found] == [
        ("a", 2, 300), ("b", 2, 300), ("c", 2, 300), ("d", 1, 100),
    ]  # fmt: skip
    assert said == "4 devices sent 1000 B and received 6.8 KiB\n"
    assert rows(capsys, "fleet", "traffic", "--since", "2100-01-01", *place)[0] == []
    assert main(["fleet", "traffic", "--since", "soon", *place]) == 4
    assert "or yesterday, or an age such as 2h or 7d" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("today", "2026-11-28T00:00:00+00:00"),
        ("yesterday", "2026-11-27T00:00:00+00:00"),
        ("90min", "2026-11-28T13:00:00+00:00"),
        ("2026-11-20", "2026-11-20T00:00:00+00:00"),
        ("2026-11-20T10:00+02:00", "2026-11-20T08:00:00+00:00"),
    ],
)
def test_a_time_since_when(text: str, expected: str) -> None:
    assert parse_moment(text, "--since", NOW).isoformat() == expected


def test_a_backup_holds_keys_and_registry_and_says_what_it_lacks(
    place: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Repository(tmp_path / "releases" / "main").files()
    file = tmp_path / "fleet.tar"
    where = [*place, "--identities", str(tmp_path / "none")]
    assert main(["server", "backup", str(file), *where]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(file) and "not included: certificates" in said.err
    assert file.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as archive:
        names = archive.getnames()
        archive.extract("server/registry.sqlite", tmp_path / "restored", filter="data")
    assert "server/registry.sqlite" in names and any("/keys/" in name for name in names)
    with closing(Database.existing(tmp_path / "restored" / "server" / "registry.sqlite")) as db:
        assert rollouts.served_release(db, "main") == 2
    assert main(["server", "backup", str(file), "--home", str(tmp_path / "nothing" / "releases")]) == 4
    assert "nothing was written" in capsys.readouterr().err
    assert (
        main(
            ["server", "backup", str(tmp_path / "b.tar"), "--database", "postgresql://x@127.0.0.1/x", *where]
        )
        == 0
    )
    assert "copy it with pg_dump" in capsys.readouterr().err
