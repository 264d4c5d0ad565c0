"""Which devices need attention or are blocked, and which run a release: counts in SQL, and the reasons in plain language."""

import re

from sqlalchemy import ColumnElement, case, func, select

from edge_fl.errors import InputError
from edge_fl.failures import Failure
from edge_fl.wire.messages import GONE
from edge_fl_server.registry import Database, registered_devices
from edge_fl_server.registry.registered_devices import STANDING, of_fleet
from edge_fl_server.registry.tables import devices

_BECAUSE = re.compile(r"because of (\w+)")
BLOCKED = STANDING != ""
HEAD_ONLY = (devices.c.capability["tier"].as_string() == "head") & ~BLOCKED
"""Devices that receive releases."""
STATUS = case((devices.c.revoked, "revoked"), else_=devices.c.status)
"""The status of a device; a revoked one's connection says nothing about the device."""
LOST = "connection lost without notice (power, network or memory); it connects again by itself"
OUTLIER = devices.c.outlier_score >= 1
DRIFT = func.coalesce(devices.c.capability["drift"].as_float(), 0.0)
GROUPS: dict[str, ColumnElement[bool]] = {
    "quarantined": ~devices.c.revoked & (devices.c.quarantine != ""),
    "alert": ~devices.c.revoked & (devices.c.status == "alert"),
    "lost": ~devices.c.revoked & (devices.c.status == "lost"),
    "outlier": ~devices.c.revoked & OUTLIER,
    "drift": ~devices.c.revoked & (DRIFT > 0),
}
"""Why a device needs attention, the most urgent first; a revocation is the operator's own decision."""
ATTENTION = case(
    *((which, urgency) for urgency, which in zip(range(len(GROUPS), 0, -1), GROUPS.values(), strict=True)),
    else_=0,
)
"""How urgently a device needs attention; 0: it does not."""
ONLY: dict[str, ColumnElement[bool]] = {
    "attention": ATTENTION > 0,
    "blocked": BLOCKED,
    "quarantined": STANDING == "quarantined",
    "revoked": STANDING == "revoked",
}
"""Filters of the list of devices."""


def by_status(db: Database, fleet: str) -> dict[str, int]:
    """The number of devices by status, without removed ones."""
    query = select(STATUS, func.count()).where(of_fleet(fleet)).group_by(STATUS)
    return db.pairs(query.order_by(STATUS))


def needing_attention(db: Database, fleet: str) -> dict[str, int]:
    """The number of devices that need attention by group, each device in its most urgent one."""
    query = select(ATTENTION, func.count()).where(of_fleet(fleet)).group_by(ATTENTION)
    by_urgency = db.pairs(query)
    return {name: by_urgency.get(len(GROUPS) - place, 0) for place, name in enumerate(GROUPS)}


def counts(db: Database, fleet: str, groups: dict[str, ColumnElement[bool]]) -> dict[str, int]:
    """The number of devices in each group, in one pass."""
    sums = (func.coalesce(func.sum(case((which, 1), else_=0)), 0) for which in groups.values())
    (row,) = db.rows(select(*sums).where(of_fleet(fleet)))
    return dict(zip(groups, row, strict=True))


def on_release(db: Database, fleet: str, release: int) -> dict[str, int]:
    """The head-only devices that are "running" a release, and the "others"; "running_gone" and "others_gone" are not connected."""
    running, gone = devices.c.release == release, devices.c.status.in_(GONE)
    groups = {
        "running": HEAD_ONLY & running,
        "running_gone": HEAD_ONLY & running & gone,
        "others": HEAD_ONLY & ~running,
        "others_gone": HEAD_ONLY & ~running & gone,
    }
    return counts(db, fleet, groups)


def reason(db: Database, fleet: str, device: str) -> str:
    """Why a device is in quarantine, as a sentence. Raises InputError if it is not."""
    record = registered_devices.get(db, fleet, device)
    if record is None or not record.quarantine:
        raise InputError(f"{device}: not in quarantine")
    return f"It is in quarantine: {quarantined(record.quarantine)}."


def quarantined(why: str) -> str:
    """The stored reason of a quarantine, with its failure word in plain language."""

    def because(found: re.Match[str]) -> str:
        return f"because {_rejection(found[1]) or found[1]}"

    return _BECAUSE.sub(because, why)


def rejected(reason: str) -> str:
    """A rejection's failure word in plain language, and the word itself."""
    meaning = _rejection(reason)
    return f"{meaning} ({reason})" if meaning else reason


def alerted(why: str) -> str:
    """A failure word of a device, with its meaning and remedy; any other reason as it is."""
    word = Failure.of(why)
    return f"{why.replace('_', ' ')}: {word.explanation}" if word and word.stated else why.replace("_", " ")


def _rejection(reason: str) -> str:
    word = Failure.of(reason)
    return word.rejection.meaning if word and word.rejection else ""
