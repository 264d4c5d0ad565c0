"""Rules of alerts: their kinds, and the settings in HOME/FLEET/alerts.toml; without the file the default rules, and no channel.

A kind of rule says what holds now for which devices, for the server or for a release, according to the registry: {subject: text}, or None
while it cannot tell, so that its alerts stay as they are.
"""

import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, get_args

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace
from sqlalchemy import ColumnElement, func, select

from edge_fl import toml
from edge_fl.console.units import cut_prose, deviations, few
from edge_fl.errors import ConfigError, nearest
from edge_fl.failures import SIGNATURE, Failure
from edge_fl.fields import Name
from edge_fl.files.paths import text
from edge_fl.wire import identity
from edge_fl.wire.transport import LIMITS
from edge_fl_console.alerts import stored
from edge_fl_console.failure_texts import alerted, quarantined
from edge_fl_server import selectors
from edge_fl_server.mqtt.statements import suspects
from edge_fl_server.registry import Database, fleets, registered_devices, registered_reports, rollouts
from edge_fl_server.registry.registered_devices import of_fleet
from edge_fl_server.registry.tables import Subject, devices
from edge_fl_server.selectors import SelectorError

log = logging.getLogger(__name__)
Found = Mapping[str, str] | None
"""Subject -> text; None: unknown at present."""
Conditions = Mapping[str, Mapping[str, str]]
"""Rule -> subject -> text, the most urgent kind first."""
DAY_S = 86_400
RESTARTS_S = 3600  # the time in which restarts are counted
ABORTED_S = 60
MIN_PAIRS = 10  # devices, for a comparison of bottom deciles
SILENT = ("lost", "unknown", "disconnected")
IDENTITIES = ("", "reader", "../broker", "../operator", "../registrar")
"""Folders of identities, from the server's, if the CA is on this machine."""
FILE = "alerts.toml"
_ABLE = devices.c.capability


@dataclass(frozen=True)
class RulePlace:
    """Where rules look: the registry and the server's folders on this machine; `identity` is that of the server, if any."""

    db: Database
    fleet: str
    folders: tuple[Path, ...] = ()
    identity: Path | None = None

    def now_s(self) -> int:
        """Seconds since 1970."""
        return int(time.time())


@dataclass(frozen=True)
class RuleKind:
    """A kind of rule: its default threshold, what that is, whether it watches devices, and the conditions that hold.

    by_text: a condition with another text is another alert, such as a second pause for another reason.
    """

    limit: float
    unit: str
    find: Callable[[RulePlace, float], Found]
    of_devices: bool = True
    by_text: bool = False


def silent(place: RulePlace, limit: float) -> Found:
    """Devices without a connection."""
    online = fleets.presence(place.db, place.fleet).online
    return _gone_for(place, limit, SILENT) if online else None


def _gone_for(place: RulePlace, limit: float, statuses: Sequence[str]) -> dict[str, str]:
    """Devices of these statuses for at least `limit` seconds; the time before the server was online, or since it left, does not count."""
    presence = fleets.presence(place.db, place.fleet)
    changed_s = datetime.fromisoformat(presence.since).timestamp() if presence.since else 0.0
    begin_s, end_s = (changed_s, place.now_s()) if presence.online else (0.0, changed_s or place.now_s())
    found = {}
    query = devices.c.status.in_(statuses) & (devices.c.seen_at != "")
    for name, status, seen_at in _rows(place, query, devices.c.status, devices.c.seen_at):
        seen_s = datetime.fromisoformat(seen_at).timestamp()
        if end_s - max(seen_s, begin_s) >= limit:
            found[name] = _gone(status, seen_at)
    return found


def failing(place: RulePlace, limit: float) -> Found:
    """Devices that report a failure which is no normal state."""
    return {
        name: cut_prose(alerted(why)) or "in alert"
        for name, why in _rows(place, devices.c.status == "alert", devices.c.why)
    }


def lost(place: RulePlace, limit: float) -> Found:
    """Devices whose connection broke, and that did not connect again in the usual time.

    A broker that ends, or restarts for a changed access list, says of every device that its connection broke, and ends the server's, too.
    """
    return _gone_for(place, limit, ("lost",))


def outlier(place: RulePlace, limit: float) -> Found:
    """Devices whose newest update differs strongly from those of the others."""
    text = "its newest update differs strongly from the others'"
    return {name: text for (name,) in _rows(place, devices.c.outlier_score >= limit)}


def drift(place: RulePlace, limit: float) -> Found:
    """Devices whose samples have drifted since the last fit."""
    drifted = func.coalesce(_ABLE["drift"].as_float(), 0.0)
    return {
        name: f"samples drifted by {deviations(value)} standard deviations"
        for name, value in _rows(place, drifted > limit, drifted)
    }


def promise(place: RulePlace, limit: float) -> Found:
    """Devices whose prediction sets miss the right class more often than promised."""
    missed = func.coalesce(_ABLE["missed"].as_float(), 0.0)
    return {
        name: f"{value:.0%} of the newest labels were outside their prediction sets"
        for name, value in _rows(place, missed > limit, missed)
    }


def quarantine(place: RulePlace, limit: float) -> Found:
    """Devices in quarantine."""
    blocked = _rows(place, devices.c.quarantine != "", devices.c.quarantine)
    return {name: cut_prose(quarantined(why)) for name, why in blocked}


def decile(place: RulePlace, limit: float) -> Found:
    """The bottom decile of accuracy on the served release, compared with the release before on the same devices."""
    served = rollouts.served_release(place.db, place.fleet)
    before = rollouts.previous_release(place.db, place.fleet, served)
    if not before:
        return {}
    old, new = (
        registered_reports.accuracies_on(place.db, place.fleet, release) for release in (before, served)
    )
    both = sorted(old.keys() & new.keys())
    if len(both) < MIN_PAIRS:
        return {}
    was, now = (float(np.quantile([values[name] for name in both], 0.1)) for values in (old, new))
    if was - now < limit:
        return {}
    text = f"bottom decile {100 * now:.1f} %, {100 * was:.1f} % on release {before} (n = {len(both)})"
    return {f"release {served}": text}


def certificate(place: RulePlace, limit: float) -> Found:
    """Devices, and identities on this machine, whose certificate ends soon; both are renewed long before."""
    until = func.coalesce(_ABLE["certificate_until"].as_integer(), 0)
    soon_s = place.now_s() + int(limit * DAY_S)
    found = {
        name: f"certificate ends {datetime.fromtimestamp(value, UTC):%Y-%m-%d}"
        for name, value in _rows(place, (until > 0) & (until < soon_s), until)
    }
    folders = [place.identity / name for name in IDENTITIES] if place.identity else []
    for folder in folders:
        if not (folder / identity.CERT_FILE).exists():
            continue
        own = identity.read(folder)
        if own.expires.timestamp() < soon_s:
            found[own.name] = f"certificate in {folder.resolve()} ends {own.expires:%Y-%m-%d}"
    return found


def disk(place: RulePlace, limit: float) -> Found:
    """Devices and folders of this machine with little free space."""
    # In alert, a full disk is the reason of the rule `failing`.
    full = (devices.c.why == Failure.ENOSPC) & (devices.c.status != "alert")
    free = _ABLE["disk_free_mb"].as_integer()
    low = full | ((free > 0) & (free < limit))  # 0: not measured
    found = {
        name: alerted(why) if why == Failure.ENOSPC else f"{mb} MB free"
        for name, why, mb in _rows(place, low, devices.c.why, free)
    }
    for folder in place.folders:
        if folder.exists() and (mb := shutil.disk_usage(folder).free >> 20) < limit:
            found["server"] = f"{mb} MB free at {folder.resolve()}"
    return found


def restarts(place: RulePlace, limit: float) -> Found:
    """Devices whose agent has ended and started again repeatedly, other than as planned."""
    counts = registered_devices.restarts(place.db, place.fleet, place.now_s() - RESTARTS_S)
    return {
        name: f"{count} unplanned restarts of the agent in an hour"
        for name, count in counts.items()
        if count > limit
    }


def rollout(place: RulePlace, limit: float) -> Found:
    """The newest roll-outs, of an extractor and of the agent's software, that are paused or were aborted by a gate.

    One that was aborted is named for ABORTED_S also after a newer one has begun.
    """
    since = datetime.fromtimestamp(place.now_s() - ABORTED_S, UTC).isoformat(timespec="milliseconds")
    found = {}
    for subject in get_args(Subject):
        records = rollouts.listed(place.db, place.fleet, subject)
        newest = records[:1] if records and (records[0].state == "paused" or records[0].by_gate) else []
        earlier = [one for one in records[1:] if one.by_gate and one.changed_at >= since]
        for record in (*newest, *earlier):
            reason = record.reason or "no reason given"
            found[f"{record.name}, roll-out {record.number}"] = f"roll-out {record.state}: {reason}"
    return found


def signatures(place: RulePlace, limit: float) -> Found:
    """Messages of the last `limit` seconds that somebody sent in the names of devices, one condition per reason."""
    found: dict[str, str] = {}
    since = datetime.fromtimestamp(place.now_s() - limit, UTC).isoformat(timespec="milliseconds")
    for reason in SIGNATURE:
        if names := registered_reports.rejected_devices(place.db, place.fleet, reason, since):
            found[reason] = f"{reason} messages of {few(names)}; {suspects(names)}"
    return found


KINDS = {
    "quarantine": RuleKind(0, "", quarantine),
    "failing": RuleKind(0, "", failing),
    "lost": RuleKind(2 * LIMITS.max_retry_s, "seconds without a connection", lost),
    "silent": RuleKind(3600, "seconds without a connection", silent),
    "disk": RuleKind(500, "MB", disk),
    "certificate": RuleKind(30, "days", certificate),
    "drift": RuleKind(0, "standard deviations", drift),
    "promise": RuleKind(0, "share of labels outside their sets", promise),
    "outlier": RuleKind(1, "score of its newest update", outlier),
    "decile": RuleKind(0.05, "loss of accuracy, 0 to 1", decile, of_devices=False),
    "rollout": RuleKind(0, "", rollout, of_devices=False, by_text=True),
    "restarts": RuleKind(5, "unplanned restarts in an hour", restarts),
    "signatures": RuleKind(3600, "seconds after the last message", signatures, of_devices=False),
}
"""Kind of rule -> its condition, the most urgent first; `limit` of a rule replaces the threshold."""
NOT_SENT = frozenset({"lost", "outlier"})
"""Rules whose alerts are only listed unless the settings name them: they come and go."""


class Rule(Struct, frozen=True, forbid_unknown_fields=True):
    """When to raise an alert.

    kind: the condition, by default the rule's name. limit: its threshold, by default that of the kind. where: the devices that it
    watches ("": all). channels: where its alerts go (none given: to all). enabled: false turns the rule off.
    """

    kind: str = ""
    limit: Annotated[float, Meta(ge=0)] | None = None
    where: str = ""
    channels: list[str] | None = None
    enabled: bool = True


class AlertSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Channels by name with their Apprise URLs, and rules by name; rules that are not named have their defaults.

    Alerts of `group_s` seconds are sent in one message; an alert is resolved when its condition has not held for `settle_s`.
    """

    channels: dict[Name, str] = {}
    rules: dict[Name, Rule] = {}
    group_s: Annotated[float, Meta(ge=0, le=3600)] = 10.0
    settle_s: Annotated[float, Meta(ge=0, le=86400)] = 60.0

    def limit(self, name: str) -> float:
        """The threshold of a rule."""
        rule = self.rules[name]
        return KINDS[rule.kind or name].limit if rule.limit is None else rule.limit

    @property
    def without_devices(self) -> set[str]:
        """The rules that do not watch devices."""
        return {name for name, rule in self.rules.items() if not KINDS[rule.kind or name].of_devices}

    def rules_of(self, channel: str) -> set[str]:
        """The rules whose alerts go to a channel."""
        return {
            name for name, rule in self.rules.items() if rule.channels is None or channel in rule.channels
        }


DEFAULT = AlertSettings(rules={name: Rule(name, channels=[] if name in NOT_SENT else None) for name in KINDS})


def path_of(home: Path, fleet: str) -> Path:
    """The file with the alerts of a fleet, next to its releases."""
    return home / fleet / FILE


def load(path: Path, db: Database, fleet: str) -> AlertSettings:
    """Read the settings; every enabled rule has its kind. Raises ConfigError."""
    found = toml.checked(toml.read(path), AlertSettings, text(path)) if path.exists() else AlertSettings()
    rules = DEFAULT.rules | found.rules
    for name, rule in rules.items():
        kind = rule.kind or name
        where = f"{text(path)}: rules.{name}"
        if kind not in KINDS:
            raise ConfigError(f"{where}.kind: {kind!r}{nearest(kind, KINDS)}")
        if unknown := sorted(set(rule.channels or ()) - found.channels.keys()):
            raise ConfigError(
                f"{where}.channels: {unknown[0]!r}{nearest(unknown[0], found.channels)}, expected one of [channels]"
            )
        if rule.where and not KINDS[kind].of_devices:
            raise ConfigError(f"{where}.where: a rule of kind {kind} watches no devices, expected none")
        try:
            selectors.require(db, fleet, rule.where)
        except ConfigError as error:
            raise ConfigError(f"{where}.where: {error.message}") from error
        rules[name] = replace(rule, kind=kind)
    return replace(found, rules={name: rule for name, rule in rules.items() if rule.enabled})


def conditions(place: RulePlace, settings: AlertSettings, *, of_devices: bool = False) -> Conditions:
    """What needs attention now, by every rule, or only by those that watch devices.

    Alerts, Health, the number of devices that need attention and the messages on the page Fleet all come from here. A rule that
    cannot tell, because no server is online or its group was removed, has the alerts that it raised last.
    """
    found: dict[str, Mapping[str, str]] = {}
    for name, rule in settings.rules.items():
        kind = KINDS[rule.kind or name]
        if of_devices and not kind.of_devices:
            continue
        holding = kind.find(place, settings.limit(name))
        if rule.where and holding is not None:
            try:
                chosen = set(selectors.selected(place.db, place.fleet, rule.where))
                holding = {subject: text for subject, text in holding.items() if subject in chosen}
            except SelectorError as error:
                log.warning("alert rule %r: %s", name, error.message)
                holding = None
        if holding is None:
            active = stored.active(place.db, place.fleet)
            holding = {alert.subject: alert.text for alert in active if alert.rule == name}
        found[name] = holding
    order = list(KINDS)
    return dict(sorted(found.items(), key=lambda item: order.index(settings.rules[item[0]].kind or item[0])))


def by_device(found: Conditions) -> dict[str, list[str]]:
    """The reasons of each device that needs attention, the most urgent first; a reason of several rules once."""
    reasons: dict[str, list[str]] = {}
    for holding in found.values():
        for device, reason in holding.items():
            if reason not in reasons.setdefault(device, []):
                reasons[device].append(reason)
    return reasons


def urgency(found: Conditions) -> dict[str, int]:
    """How urgently each device needs attention, by the place of its most urgent rule."""
    places = zip(range(len(found), 0, -1), found.values(), strict=True)
    return {device: place for place, holding in reversed(list(places)) for device in holding}


def _gone(status: str, seen_at: str) -> str:
    return f"{status}, last message {seen_at[:16].replace('T', ' ')} UTC"


def _rows(place: RulePlace, condition: ColumnElement[bool], *columns: ColumnElement) -> list[tuple]:
    """(name, columns ...) of the devices that meet a condition, without revoked and removed ones."""
    query = select(devices.c.device, *columns).where(of_fleet(place.fleet), ~devices.c.revoked, condition)
    return [tuple(row) for row in place.db.rows(query.order_by(devices.c.device))]
