"""The devices of a fleet in the registry: the last state and capability of each, whether its reports count, and the operator's settings."""

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, and_, case, delete, func, select, true, update

from edge_fl.fleet.remote_settings import DesiredSettings, Value
from edge_fl.wire.messages import GONE
from edge_fl_server.registry.database import Database, now
from edge_fl_server.registry.tables import DeviceRecord, boots, devices, metadata, requests, settings, sums

KEPT_COLUMNS = (
    "first_seen_at",
    "quarantine",
    "revoked",
    "blocked_at",
    "rejections",
    "outlier_score",
    "dropped",
    "removed",
)
"""Columns that a message of the device does not change."""
UNKNOWN = DeviceRecord("", "").status
STANDING = case(
    (devices.c.removed != "", "removed"),
    (devices.c.revoked, "revoked"),
    (devices.c.quarantine != "", "quarantined"),
    else_="",
)
"""Why the reports of a device do not count, "" if they do."""
HEAD_ONLY = (devices.c.capability["tier"].as_string() == "head") & (STANDING == "")
"""Devices that receive releases: the head-only ones whose reports count."""
MAX_SCORE = 1e6


def of_fleet(fleet: str) -> ColumnElement[bool]:
    """The condition of a fleet's devices, without those that were decommissioned or renamed."""
    return and_(devices.c.fleet == fleet, devices.c.removed == "")


def record(db: Database, records: Iterable[DeviceRecord]) -> None:
    """Store the latest state of devices; quarantine and revocation stay as they are."""
    at = now()
    rows = [
        {**msgspec.to_builtins(record), "seen_at": at, "first_seen_at": record.first_seen_at or at}
        for record in records
    ]
    with db.writing() as connection:
        db.upsert(connection, devices, rows, *KEPT_COLUMNS)


def record_restarts(db: Database, fleet: str, boots_of: Iterable[tuple[str, str]]) -> None:
    """Store that devices run another process of their agent, by its boot id, and that this was not planned."""
    now_s = int(time.time())
    rows = [{"fleet": fleet, "device": device, "boot": boot, "at_s": now_s} for device, boot in boots_of]
    with db.writing() as connection:
        db.upsert(connection, boots, rows, "at_s")


def restarts(db: Database, fleet: str, since_s: int) -> dict[str, int]:
    """Device -> the number of unplanned restarts of its agent since then."""
    mine = boots.c.fleet == fleet
    query = select(boots.c.device, func.count()).where(mine, boots.c.at_s >= since_s)
    return db.pairs(query.group_by(boots.c.device))


def forget_boots(db: Database, fleet: str, before_s: int) -> None:
    """Delete the restarts before that time."""
    db.change(delete(boots).where(boots.c.fleet == fleet, boots.c.at_s < before_s))


def mark_unknown(db: Database, fleet: str, sequences: range) -> None:
    """Set present devices whose last message has a number in `sequences` to "unknown": no server receives their messages any more."""
    present = update(devices).where(devices.c.fleet == fleet, devices.c.status.not_in({*GONE, UNKNOWN}))
    numbered = devices.c.seen_sequence.between(sequences.start, sequences.stop - 1)
    db.change(present.where(numbered).values(status=UNKNOWN, activity="idle"))


def listed(db: Database, fleet: str) -> list[DeviceRecord]:
    """All devices ever seen, also removed ones, ascending."""
    return db.find(select(devices).where(devices.c.fleet == fleet).order_by(devices.c.device), DeviceRecord)


def names(db: Database, fleet: str) -> list[str]:
    """The names of a fleet's devices, ascending."""
    query = select(devices.c.device).where(of_fleet(fleet)).order_by(devices.c.device)
    return [row.device for row in db.rows(query)]


def get(db: Database, fleet: str, device: str) -> DeviceRecord | None:
    """One device."""
    query = select(devices).where(devices.c.fleet == fleet, devices.c.device == device)
    return db.one(query, DeviceRecord)


def blocked(db: Database, fleet: str) -> dict[str, str]:
    """Devices whose reports do not count -> "removed", "quarantined" or "revoked"."""
    return db.pairs(select(devices.c.device, STANDING).where(devices.c.fleet == fleet, STANDING != ""))


def quarantine(db: Database, fleet: str, device: str, why: str) -> None:
    """Block a device: its reports do not count from now on."""
    _change(db, fleet, device, quarantine=why or "quarantined", blocked_at=now())


def readmit(db: Database, fleet: str, device: str) -> None:
    """End a quarantine or removal; reset the count of rejected reports, the outlier score, and which signed messages were the last."""
    none = {"rejections": 0, "outlier_score": 0.0, "signed_state": 0, "signed_meta": 0}
    _change(db, fleet, device, quarantine="", removed="", **none)


def remove(db: Database, fleet: str, device: str, why: str) -> None:
    """Mark a device as removed; requests to it that are open are cancelled, its history stays."""
    with db.writing() as connection:
        _remove(connection, db, fleet, device, why)


def rename(db: Database, fleet: str, old: str, new: str) -> None:
    """Give a device's state, tags, reports and requests another name, and mark the old one as removed; all in one transaction."""
    with db.writing() as connection:
        for table in metadata.sorted_tables:
            if {"fleet", "device"} <= set(table.c.keys()):
                mine = (table.c.fleet == fleet) & (table.c.device == old)
                connection.execute(update(table).where(mine).values(device=new))
        _write(connection, db, fleet, new, status=UNKNOWN, activity="idle", revoked=False)
        _remove(connection, db, fleet, old, f"renamed to {new}")


def set_revoked(db: Database, fleet: str, names: Collection[str]) -> None:
    """Block exactly these devices as revoked, also in sessions that are still open; devices that are not known are added."""
    at = now()
    with db.writing() as connection:
        mine = devices.c.fleet == fleet
        before = set(connection.execute(select(devices.c.device).where(mine, devices.c.revoked)).scalars())
        for device in set(names) - before:
            _write(connection, db, fleet, device, revoked=True, blocked_at=at)
        for device in before - set(names):
            _write(connection, db, fleet, device, revoked=False)


def count_dropped(db: Database, fleet: str, device: str, messages: int) -> None:
    """Add to the messages of a device that were dropped above the rate limit."""
    _change(db, fleet, device, dropped=devices.c.dropped + messages)


def score(db: Database, fleet: str, scores: Mapping[str, float]) -> None:
    """Store the newest outlier score of each device."""
    at = now()
    rows = [
        {
            **msgspec.to_builtins(DeviceRecord(fleet, device, first_seen_at=at)),
            # Also NaN becomes the maximum.
            "outlier_score": score if score < MAX_SCORE else MAX_SCORE,
        }
        for device, score in scores.items()
    ]
    db.put(devices, rows, *(column.name for column in devices.c if column.name != "outlier_score"))


def change_settings(
    db: Database, fleet: str, names: Iterable[str], changes: Mapping[str, Value | None]
) -> None:
    """Set settings of these devices; None gives one back to the device."""
    values = {
        key: "" if value is None else msgspec.json.encode(value).decode() for key, value in changes.items()
    }
    with db.writing() as connection:
        last = connection.execute(select(func.max(settings.c.serial))).scalar() or 0
        serial = max(last + 1, time.time_ns() // 1000)
        rows = [
            {"fleet": fleet, "device": name, "key": key, "value": value, "serial": serial}
            for name in names
            for key, value in values.items()
        ]
        db.upsert(connection, settings, rows)


def desired_settings(
    db: Database, fleet: str, after: int = 0, *, device: str = ""
) -> dict[str, DesiredSettings]:
    """The operator's settings by device, of all devices or one; only where they changed after that serial."""
    mine = (settings.c.fleet == fleet) & (settings.c.device == device if device else true())
    changed = select(settings.c.device).where(mine, settings.c.serial > after)
    query = select(settings).where(mine, settings.c.device.in_(changed)).order_by(settings.c.key)
    found: dict[str, DesiredSettings] = {}
    for row in db.rows(query):
        before = found.get(row.device, DesiredSettings(0, {}))
        value = {row.key: msgspec.json.decode(row.value)} if row.value else {}
        found[row.device] = DesiredSettings(max(before.serial, row.serial), {**before.values, **value})
    return found


def last_sums(db: Database, fleet: str) -> dict[str, int]:
    """Device -> the number of the signature that opened the last secure sum for which a vector of it arrived."""
    return db.pairs(select(sums.c.device, sums.c.opened).where(sums.c.fleet == fleet))


def record_sum(db: Database, fleet: str, device: str, opened: int) -> None:
    """Store the number of a later sum; 0, of one that was not signed, stores nothing."""
    if opened:
        db.put(sums, [{"fleet": fleet, "device": device, "opened": opened}])


def _remove(connection: Connection, db: Database, fleet: str, device: str, why: str) -> None:
    changes = {"removed": why, "status": UNKNOWN, "activity": "idle", "blocked_at": now()}
    _write(connection, db, fleet, device, **changes)
    mine = (requests.c.fleet == fleet) & (requests.c.device == device) & (requests.c.state == "queued")
    connection.execute(update(requests).where(mine).values(state="cancelled", reason=why, ended_at=now()))


def _change(db: Database, fleet: str, device: str, **changes: Any) -> None:
    with db.writing() as connection:
        _write(connection, db, fleet, device, **changes)


def _write(connection: Connection, db: Database, fleet: str, device: str, **changes: Any) -> None:
    """Change a device, adding it first if it is not known."""
    db.insert_new(connection, devices, msgspec.to_builtins(DeviceRecord(fleet, device, first_seen_at=now())))
    mine = (devices.c.fleet == fleet) & (devices.c.device == device)
    connection.execute(update(devices).where(mine).values(**changes))
