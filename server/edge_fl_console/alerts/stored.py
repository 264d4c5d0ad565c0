"""Alerts of a fleet, what of them was delivered on which channel, and silences.

An alert is delivered twice on a channel: as "raised" and as "resolved". A delivery is claimed before it is sent, so that several processes
send it once; a claim whose process ended before the result was stored is taken over after CLAIM_S.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from msgspec import Struct
from sqlalchemy import ColumnElement, and_, delete, or_, select, update

from edge_fl_server.registry.database import Database
from edge_fl_server.registry.tables import AlertRecord, alert_deliveries, alerts, silences

CLAIM_S = 120
KEPT_S = 30 * 86_400  # after the resolution
Event = Literal["raised", "resolved"]


class Due(Struct, frozen=True):
    """An event of an alert that is to be sent on a channel."""

    event: Event
    alert: AlertRecord


def active(db: Database, fleet: str) -> list[AlertRecord]:
    """The alerts whose condition holds, oldest first."""
    query = select(alerts).where(alerts.c.fleet == fleet, alerts.c.resolved_s == 0)
    return db.find(query.order_by(alerts.c.number), AlertRecord)


def listed(db: Database, fleet: str, since_s: int) -> list[AlertRecord]:
    """The active alerts and those resolved since, newest first."""
    shown = or_(alerts.c.resolved_s == 0, alerts.c.resolved_s >= since_s)
    query = select(alerts).where(alerts.c.fleet == fleet, shown)
    return db.find(query.order_by(alerts.c.number.desc()), AlertRecord)


def update_active(
    db: Database, fleet: str, raised: Iterable[tuple[str, str, str]], resolved: Collection[int], now_s: int
) -> None:
    """Resolve alerts by number, and add others (rule, subject, text) unless they are active already."""
    with db.writing() as connection:
        if resolved:
            chosen = alerts.c.number.in_(sorted(resolved)) & (alerts.c.resolved_s == 0)
            connection.execute(update(alerts).where(chosen).values(resolved_s=now_s))
        for rule, subject, text in raised:
            row = {"fleet": fleet, "rule": rule, "subject": subject, "text": text}
            db.insert_new(connection, alerts, row | {"raised_s": now_s, "resolved_s": 0})


def forget(db: Database, fleet: str, now_s: int) -> None:
    """Delete what was resolved long ago, and ended silences."""
    old = and_(alerts.c.fleet == fleet, alerts.c.resolved_s > 0, alerts.c.resolved_s < now_s - KEPT_S)
    with db.writing() as connection:
        numbers = select(alerts.c.number).where(old)
        connection.execute(delete(alert_deliveries).where(alert_deliveries.c.number.in_(numbers)))
        connection.execute(delete(alerts).where(old))
        connection.execute(delete(silences).where(silences.c.fleet == fleet, silences.c.until_s <= now_s))


def claim(
    db: Database, fleet: str, channel: str, rules: Collection[str], *, before_s: int, now_s: int
) -> list[Due]:
    """Claim what is due on a channel that takes these rules; none of it is then due for another process.

    Due are alerts raised until `before_s` that are not silenced, and the resolution of those that were sent. One that was resolved before
    it was sent is not sent.
    """
    quiet = silenced(db, fleet, now_s)
    sent = {(row.number, row.event): row for row in _deliveries(db, fleet, channel)}
    found: list[Due] = []
    for alert in reversed(listed(db, fleet, now_s - KEPT_S)):
        raised = sent.get((alert.number, "raised"))
        if alert.resolved_s:
            if raised and raised.sent:
                found.append(Due("resolved", alert))
        elif (
            alert.rule in rules
            and alert.raised_s <= before_s
            and not {alert.rule, alert.subject} & quiet.keys()
        ):
            found.append(Due("raised", alert))
    return [
        due
        for due in found
        if (before := sent.get((due.alert.number, due.event))) is None or before.stale(now_s)
        if _claimed(db, channel, due, before, now_s)
    ]


def settle(db: Database, channel: str, events: Iterable[Due], *, sent: bool) -> None:
    """Store that claimed events were sent, or return them because they were not."""
    rows = alert_deliveries.c
    with db.writing() as connection:
        for due in events:
            this = _of(due, channel)
            if sent:
                connection.execute(update(alert_deliveries).where(this).values(sent=True))
            else:
                connection.execute(delete(alert_deliveries).where(this, ~rows.sent))


def delivered(db: Database, fleet: str) -> dict[int, list[str]]:
    """The channels on which each alert was sent."""
    query = select(alert_deliveries.c.number, alert_deliveries.c.channel).join(
        alerts, alerts.c.number == alert_deliveries.c.number
    )
    raised = (alert_deliveries.c.event == "raised") & alert_deliveries.c.sent & (alerts.c.fleet == fleet)
    found: dict[int, list[str]] = {}
    for number, channel in db.rows(query.where(raised).order_by(alert_deliveries.c.channel)):
        found.setdefault(number, []).append(channel)
    return found


def silence(db: Database, fleet: str, name: str, until_s: int) -> None:
    """Send no alert of a rule, or about a subject, until then."""
    db.put(silences, [{"fleet": fleet, "name": name, "until_s": until_s}])


def silenced(db: Database, fleet: str, now_s: int) -> Mapping[str, int]:
    """Silenced rule or subject -> until when."""
    query = select(silences.c.name, silences.c.until_s).where(
        silences.c.fleet == fleet, silences.c.until_s > now_s
    )
    return db.pairs(query)


class _Delivery(Struct, frozen=True):
    number: int
    event: Event
    sent: bool
    at_s: int

    def stale(self, now_s: int) -> bool:
        """Whether it was claimed by a process that has not stored a result."""
        return not self.sent and self.at_s < now_s - CLAIM_S


def _deliveries(db: Database, fleet: str, channel: str) -> list[_Delivery]:
    query = select(alert_deliveries).join(alerts, alerts.c.number == alert_deliveries.c.number)
    return db.find(query.where(alerts.c.fleet == fleet, alert_deliveries.c.channel == channel), _Delivery)


def _claimed(db: Database, channel: str, due: Due, before: _Delivery | None, now_s: int) -> bool:
    """Whether this process got the delivery."""
    rows = alert_deliveries.c
    key = {"number": due.alert.number, "channel": channel, "event": due.event}
    with db.writing() as connection:
        if before is None:
            return db.insert_new(connection, alert_deliveries, key | {"sent": False, "at_s": now_s})
        same = _of(due, channel) & (rows.at_s == before.at_s) & ~rows.sent
        return connection.execute(update(alert_deliveries).where(same).values(at_s=now_s)).rowcount > 0


def _of(due: Due, channel: str) -> ColumnElement[bool]:
    rows = alert_deliveries.c
    return (rows.number == due.alert.number) & (rows.channel == channel) & (rows.event == due.event)
