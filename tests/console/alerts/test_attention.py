"""Alerts, Health, the number of devices that need attention and the messages on Fleet name the same devices with the same reasons."""

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import update

from edge_fl.failures import Failure
from edge_fl_console.alerts import rules, stored
from edge_fl_console.alerts.rules import DAY_S, AlertSettings, Rule, RulePlace
from edge_fl_console.alerts.watcher import Evaluator
from edge_fl_console.dashboard.context import PageContext
from edge_fl_console.dashboard.pages import fleet, overview
from edge_fl_console.dashboard.pages.fleet import FleetQuery
from edge_fl_server.registry import Database, fleets, registered_devices, registered_tags
from edge_fl_server.registry.tables import DeviceRecord, devices, servers

WORDS = [word for word in Failure if word.stated and not word.calm]
ALL = 500  # rows of a page


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    """A fleet with a device for every failure word, for every rule, and for several of them at once; and healthy and revoked ones."""
    db = Database.open(database_url)
    fleets.begin(db, "main", 1)
    with db.writing() as connection:
        connection.execute(servers.update().values(since_s=int(time.time()) - 7200))
    able = {"tier": "head", "disk_free_mb": 9000, "certificate_until": int(time.time()) + 300 * DAY_S}
    records = {f"word-{word}": {"status": "alert", "why": word} for word in WORDS}
    records |= {
        "healthy": {},
        "calm": {"why": Failure.NO_LABELS},
        "revoked": {"status": "lost", "why": Failure.ERROR, "capability": able | {"drift": 3.0}},
        "quarantine": {},
        "lost": {"status": "lost"},
        "silent": {"status": "disconnected"},
        "lost-long-ago": {"status": "lost"},
        "drift": {"status": "alert", "why": Failure.DRIFT, "capability": able | {"drift": 2.5}},
        "promise": {"why": Failure.PROMISE_BROKEN, "capability": able | {"missed": 0.3}},
        "disk": {"capability": able | {"disk_free_mb": 90}},
        "certificate": {"capability": able | {"certificate_until": int(time.time()) + DAY_S}},
        "several": {"status": "lost", "capability": able | {"disk_free_mb": 9, "drift": 1.0}},
        "outlier": {},
        "restarts": {},
    }
    rows = [
        DeviceRecord("main", name, **{"status": "ready", "capability": able, "boot": "b", **fields})
        for name, fields in records.items()
    ]
    registered_devices.record(db, rows)
    registered_devices.record_restarts(db, "main", [("restarts", f"b{n}") for n in range(6)])
    registered_devices.quarantine(
        db, "main", "quarantine", "3 reports rejected, the last one because of norm"
    )
    registered_devices.set_revoked(db, "main", ["revoked"])
    registered_devices.score(db, "main", {"outlier": 2.0, "several": 1.0})
    with db.writing() as connection:
        lost = ["lost", "several", "revoked"]
        minute_ago = (datetime.now(UTC) - timedelta(minutes=1)).isoformat(timespec="milliseconds")
        connection.execute(update(devices).where(devices.c.device.in_(lost)).values(seen_at=minute_ago))
        old = devices.c.device.in_(["silent", "lost-long-ago"])
        connection.execute(update(devices).where(old).values(seen_at="2020-01-01T00:00:00.000+00:00"))
    yield db
    db.close()


def alerts(db: Database, settings: AlertSettings) -> dict[str, dict[str, str]]:
    """Rule -> device -> text of the alerts that a server raises."""
    Evaluator(RulePlace(db, "main"), settings).look()
    found: dict[str, dict[str, str]] = {}
    for alert in stored.active(db, "main"):
        found.setdefault(alert.rule, {})[alert.subject] = alert.text
    return found


def require_agreement(db: Database, settings: AlertSettings, found: Mapping[str, Mapping[str, str]]) -> None:
    """All four show the devices and reasons of these alerts."""
    reasons: dict[str, set[str]] = {}
    for holding in found.values():
        for device, text in holding.items():
            reasons.setdefault(device, set()).add(text)
    page = overview.read(db, "main", settings)
    assert page.attention == len(reasons)
    assert {one.rule: one.devices for one in page.health} == {rule: len(one) for rule, one in found.items()}
    shown = overview.health(page)
    rows = fleet.read(db, "main", FleetQuery(), per_page=ALL, settings=settings)
    assert rows.by_only["attention"] == len(reasons)
    messages = {row.device: set(row.reasons) for row in rows.rows if row.reasons}
    assert messages == reasons
    assert {row.device for row in rows.rows[: len(reasons)]} == reasons.keys()  # they come first
    for row in rows.rows:
        message = fleet.message(row)
        assert all(text in message for text in row.reasons)
        assert bool(message) == bool(row.reasons) or row.standing == "revoked"
    for rule, holding in found.items():
        chosen = fleet.read(db, "main", FleetQuery(only=rule), per_page=ALL, settings=settings)
        assert {row.device for row in chosen.rows} == holding.keys() and f"/fleet?only={rule}" in shown
    chosen = fleet.read(db, "main", FleetQuery(only="attention"), per_page=ALL, settings=settings)
    assert {row.device for row in chosen.rows} == reasons.keys()


def test_all_four_name_the_same_devices_with_the_same_reasons(db: Database) -> None:
    found = alerts(db, rules.DEFAULT)
    of_devices = {name for name, kind in rules.KINDS.items() if kind.of_devices}
    assert found.keys() == of_devices  # the fleet has a device for each
    assert found["failing"].keys() == {f"word-{word}" for word in WORDS} | {"drift"}
    assert {device for one in found.values() for device in one}.isdisjoint({"healthy", "calm", "revoked"})
    assert "because its update is much larger than allowed" in found["quarantine"]["quarantine"]
    require_agreement(db, rules.DEFAULT, found)
    fleets.end(db, "main", 1)  # without a server the silent ones stay as it found them
    require_agreement(db, rules.DEFAULT, found)


def test_they_agree_on_rules_of_the_operators_own(db: Database, tmp_path: Path) -> None:
    path = tmp_path / "main" / "alerts.toml"
    path.parent.mkdir()
    path.write_text(
        "[rules.lost]\nenabled = false\n[rules.drift]\nlimit = 2\n"
        "[rules.berlin]\nkind = 'disk'\nlimit = 100000\nwhere = 'site=berlin'"
    )
    registered_tags.change(db, "main", ["healthy", "calm"], {"site": "berlin"})
    settings = PageContext(db, "main", tmp_path).alerts
    assert settings.rules["berlin"] == Rule("disk", 100_000, "site=berlin")
    found = alerts(db, settings)
    assert found["berlin"].keys() == {"healthy", "calm"} and found["drift"].keys() == {"drift"}
    assert "lost" not in found
    require_agreement(db, settings, found)


def test_a_device_that_comes_and_goes_is_listed_and_not_sent() -> None:
    settings = AlertSettings(channels={"ops": "json://x"}, rules=rules.DEFAULT.rules)
    assert rules.KINDS.keys() - settings.rules_of("ops") == {"lost", "outlier"}
