"""The conditions of alerts, from what the registry knows."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from edge_fl.console.units import cut_prose
from edge_fl.errors import ConfigError
from edge_fl.wire.messages import Report
from edge_fl_broker.provision.authority import Authority
from edge_fl_console.alerts import rules
from edge_fl_console.alerts.rules import KINDS, RulePlace
from edge_fl_console.failure_texts import alerted
from edge_fl_server.registry import (
    Database,
    fleets,
    registered_devices,
    registered_reports,
    rollouts,
    tables,
)
from edge_fl_server.registry.tables import DeviceRecord, RejectionRecord, devices, servers

HOUR_S, DAY_S = 3600, 86_400


@pytest.fixture
def place() -> RulePlace:
    return RulePlace(Database.open(), "main")


def add(place: RulePlace, device: str, status: str = "ready", **fields: object) -> None:
    registered_devices.record(place.db, [DeviceRecord("main", device, status, **fields)])  # type: ignore[arg-type]


def seen(place: RulePlace, device: str, ago_s: float) -> None:
    at = datetime.now(UTC) - timedelta(seconds=ago_s)
    with place.db.writing() as connection:
        connection.execute(devices.update().where(devices.c.device == device).values(seen_at=at.isoformat()))


def server_online(place: RulePlace, since_s: int) -> None:
    fleets.begin(place.db, "main", 1)
    with place.db.writing() as connection:
        connection.execute(servers.update().values(since_s=int(time.time()) - since_s))


def found(place: RulePlace, kind: str, limit: float | None = None) -> rules.Found:
    return KINDS[kind].find(place, KINDS[kind].limit if limit is None else limit)


def test_a_silent_device_has_had_no_connection_while_a_server_was_online(place: RulePlace) -> None:
    for name, status, ago_s in (
        ("a", "lost", 7200),
        ("b", "lost", 60),
        ("c", "ready", 7200),
        ("d", "unknown", 7200),
    ):
        add(place, name, status)
        seen(place, name, ago_s)
    registered_devices.set_revoked(place.db, "main", ["e"])
    assert found(place, "silent") is None  # no server that receives messages
    server_online(place, since_s=60)
    assert found(place, "silent") == {}
    server_online(place, since_s=4000)
    silent = found(place, "silent")
    assert (
        silent is not None
        and sorted(silent) == ["a", "d"]
        and silent["a"].startswith("lost, last message 20")
    )


def test_a_broker_that_restarts_makes_no_device_lost_that_returns_in_the_usual_time(place: RulePlace) -> None:
    """It says of all that their connections broke; the server's own connection breaks, too, and returns before some of them."""
    for name, ago_s in (("just", 5), ("late", 40)):
        add(place, name, "lost")
        seen(place, name, ago_s)
    server_online(place, since_s=10)
    left = servers.update().values(online=False, since_s=int(time.time()) - 30)
    with place.db.writing() as connection:
        connection.execute(left)
    assert found(place, "lost") == {}  # nobody can say it before the server is back
    server_online(place, since_s=10)
    assert found(place, "lost") == {}
    server_online(place, since_s=400)
    assert (found(place, "lost") or {}).keys() == {"late"}


def test_devices_with_drift_quarantine_a_full_disk_or_an_old_certificate_are_named(place: RulePlace) -> None:
    soon, later = int(time.time()) + 5 * DAY_S, int(time.time()) + 300 * DAY_S
    add(place, "a", capability={"drift": 2.46, "disk_free_mb": 90, "certificate_until": soon, "missed": 0.3})
    add(place, "b", why="enospc", capability={"drift": 0.0, "disk_free_mb": 9000, "certificate_until": later})
    add(place, "c")
    registered_devices.quarantine(place.db, "main", "c", "flooding")
    assert found(place, "drift") == {"a": "samples drifted by 2.5 standard deviations"}
    assert found(place, "drift", 3.0) == {}
    assert found(place, "promise") == {"a": "30% of the newest labels were outside their prediction sets"}
    assert found(place, "quarantine") == {"c": "flooding"}
    assert found(place, "disk") == {"a": "90 MB free", "b": alerted("enospc")}
    assert (found(place, "certificate") or {}).keys() == {"a"}


def test_what_a_device_says_makes_no_alert_unreadable(place: RulePlace) -> None:
    add(place, "a", capability={"drift": 1e12})
    add(place, "b", "alert", why="x" * 2000)
    assert found(place, "drift") == {"a": "samples drifted by more than 100 standard deviations"}
    assert found(place, "failing") == {"b": cut_prose("x" * 2000)}


def test_messages_that_somebody_sent_for_devices_are_one_alert_per_reason(place: RulePlace) -> None:
    assert found(place, "signatures") == {}
    for name in ("a", "b", "c", "d", "e"):
        registered_reports.reject(
            place.db, RejectionRecord("main", name, "state", "", 0, "replayed", "older")
        )
    registered_reports.reject(place.db, RejectionRecord("main", "a", "state", "", 0, "norm", "too large"))
    assert found(place, "signatures") == {
        "replayed": "replayed messages of 5 devices (a, b, c and 2 more); distrust the broker"
    }
    assert found(place, "signatures", -60) == {}  # long ago
    registered_devices.set_revoked(place.db, "main", ["b", "c", "d", "e"])
    assert found(place, "signatures") == {
        "replayed": "replayed messages of 1 device (a); distrust the broker, or this device"
    }


def test_the_servers_disk_and_the_certificates_next_to_it_are_watched(tmp_path: Path) -> None:
    Authority.make(tmp_path / "ca")
    place = RulePlace(Database.open(), "main", (tmp_path,), tmp_path / "ca" / "server")
    assert found(place, "certificate", 30) == {} == found(place, "disk", 0)
    # the operator's certificate is for 90 days, those of server and broker for five years
    assert (found(place, "certificate", 100) or {}).keys() == {"operator"}
    assert {"server", "broker", "registrar"} <= (found(place, "certificate", 365 * 6) or {}).keys()
    assert "MB free at " in (found(place, "disk", 1e12) or {})["server"]


def test_an_agent_that_restarts_again_and_again_is_named(place: RulePlace) -> None:
    for number in range(6):
        registered_devices.record_restarts(place.db, "main", [("a", f"boot-{number}"), ("b", "boot")])
    assert found(place, "restarts") == {"a": "6 unplanned restarts of the agent in an hour"}
    registered_devices.forget_boots(place.db, "main", int(time.time()) + 1)
    assert found(place, "restarts") == {}


def test_a_roll_out_that_paused_or_was_aborted_is_named_until_it_goes_on(place: RulePlace) -> None:
    number = rollouts.begin(place.db, "main", 7)
    for state, reason, expected in (
        ("running", "", {}),
        (
            "paused",
            "stage 1: 2 of 4 devices succeeded",
            {"release 7, roll-out 1": "roll-out paused: stage 1: 2 of 4 devices succeeded"},
        ),
        ("aborted", "by hand", {}),
        ("aborted", "accuracy", {"release 7, roll-out 1": "roll-out aborted: accuracy"}),
    ):
        record = rollouts.get(place.db, number)
        assert record is not None
        rollouts.advance(place.db, record, state=state, reason=reason)
        assert found(place, "rollout") == expected
    rollouts.begin(place.db, "main", 8)
    assert list(found(place, "rollout") or ()) == ["release 7, roll-out 1"]  # for a minute
    with place.db.writing() as connection:
        connection.execute(tables.rollouts.update().values(changed_at="2026-11-20T14:03:00.000+00:00"))
    assert found(place, "rollout") == {}


def test_a_roll_out_of_an_agent_that_paused_is_named_next_to_one_of_an_extractor(place: RulePlace) -> None:
    for subject in ("extractor", "agent"):
        number = rollouts.begin(place.db, "main", 7, subject=subject)
        record = rollouts.get(place.db, number)
        assert record and rollouts.advance(place.db, record, state="paused", reason=f"of {subject}")
    assert found(place, "rollout") == {
        "release 7, roll-out 1": "roll-out paused: of extractor",
        "agent release 7, roll-out 2": "roll-out paused: of agent",
    }


def test_a_falling_bottom_decile_is_measured_on_the_same_devices(place: RulePlace) -> None:
    for device in range(21):
        add(place, f"d{device}", capability={"tier": "head"})
    registered_devices.remove(place.db, "main", "d20", "decommissioned")
    for release, lost in ((1, 0.0), (2, 0.2)):
        for device in range(21):
            accuracy = 0.9 - (lost if device < 4 else 0.0)
            report = Report(
                f"rel-{release}", "head", "b", 9, {"accuracy": accuracy}, release=release, head="svm"
            )
            record = registered_reports.record_of("main", f"d{device}", "none", 0, report)
            registered_reports.accept(place.db, record.__class__(**{**_fields(record), "after": accuracy}))
        number = rollouts.begin(place.db, "main", release, previous=release - 1)
        record = rollouts.get(place.db, number)
        assert record is not None
        rollouts.advance(place.db, record, state="completed")
        if release == 1:
            assert found(place, "decile") == {}
    assert found(place, "decile") == {"release 2": "bottom decile 70.0 %, 90.0 % on release 1 (n = 20)"}
    assert found(place, "decile", 0.25) == {}


def _fields(record: object) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__struct_fields__}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[rules.silnt]", r"rules.silnt.kind: 'silnt' \(did you mean 'silent'\?\)"),
        ("[rules.silent]\nlimits = 3", "did you mean 'limit'"),
        ("[rules.silent]\nwhere = 'site='", "rules.silent.where: selector 'site=': position 6"),
        ("[rules.rollout]\nwhere = 'site=a'", "kind rollout watches no devices"),
        ("[rules.disk]\nchannels = ['ops']", r"rules.disk.channels: 'ops', expected one of \[channels\]"),
        ("[rules.disk]\nlimit = -1", "limit"),
        ("[channels]\nOps = 'json://x'", "Ops"),
    ],
)
def test_a_mistake_in_the_settings_names_its_place(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "alerts.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        rules.load(path, Database.open(), "main")


def test_rules_have_defaults_and_a_kind_may_have_several(tmp_path: Path) -> None:
    path = tmp_path / "alerts.toml"
    assert rules.load(path, Database.open(), "main").rules.keys() == KINDS.keys()
    path.write_text(
        "[channels]\na = 'json://h'\nb = 'json://i'\n[rules.drift]\nenabled = false\n"
        "[rules.berlin]\nkind = 'silent'\nlimit = 60\nwhere = 'site=berlin'\nchannels = ['a']"
    )
    found = rules.load(path, Database.open(), "main")
    assert found.rules.keys() == KINDS.keys() - {"drift"} | {"berlin"}
    assert (found.limit("berlin"), found.limit("silent")) == (60, 3600)
    assert found.rules_of("a") - found.rules_of("b") == {"berlin"}
