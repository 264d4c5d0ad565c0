"""Watch a fleet next to a server: evaluate the rules, keep the alerts in the registry and send them, and record the fleet's history.

A channel is an Apprise URL for mail (mailto://), a webhook (json://), MQTT (mqtt://) or another service. Every channel has its own
thread, so that one that does not respond delays no other. Several servers may watch one fleet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from edge_fl import threads
from edge_fl.console.output import print_status
from edge_fl.errors import ConfigError, ConnectError, EdgeFLError, brief, shortened
from edge_fl_console.alerts import rules, stored
from edge_fl_console.alerts.rules import DAY_S, KINDS, AlertSettings, RulePlace
from edge_fl_console.alerts.stored import Due
from edge_fl_console.history import HistoryRecorder
from edge_fl_server.registry import Database, registered_devices

if TYPE_CHECKING:
    from apprise import Apprise

log = logging.getLogger(__name__)

SEND_S = 30
POLL_S = 2.0
RETRY_S = (10.0, 300.0)  # pause after a failed delivery: the first, and the longest
CLOSE_S = 5.0
MAX_NAMES = 20
HOUR_S = 3600


@dataclass(frozen=True)
class Channel:
    """A channel by name; its URL may hold a password and is not shown."""

    name: str
    service: Apprise

    @classmethod
    def open(cls, name: str, url: str) -> Channel:
        """Raises ConfigError for a URL that names no known service."""
        import apprise

        # Its own records may quote URLs; errors are reported by the channel's name instead.
        logging.getLogger("apprise").propagate = False
        service = apprise.Apprise(
            asset=apprise.AppriseAsset(app_id="edge-fl", async_mode=False, storage_path=None)
        )
        if not service.add(url):
            raise ConfigError(
                f"channel {name!r}: its URL names no service, expected one of Apprise such as mailto://, json:// or mqtt://"
            )
        return cls(name, service)

    def send(self, title: str, body: str, *, good: bool = False) -> None:
        """Send a message; `good`: it only reports resolved alerts. Raises ConnectError if the service did not accept it."""
        from apprise import NotifyFormat, NotifyType

        kind = NotifyType.SUCCESS if good else NotifyType.WARNING
        result = self.service.notify(
            body=body, title=title, notify_type=kind, body_format=NotifyFormat.TEXT, timeout=SEND_S
        )
        if not result:
            entries = [
                entry.message for entry in result.logs() if entry.level in ("WARNING", "ERROR", "CRITICAL")
            ]
            reason = brief(" ".join(" ".join(entries).split())) or "it did not accept the message"
            raise ConnectError(f"alert channel {self.name!r}: {reason}")


class Evaluator:
    """Compares what the rules find with the active alerts of the registry."""

    def __init__(self, place: RulePlace, settings: AlertSettings) -> None:
        self._place, self._settings = place, settings
        self._absent_s: dict[int, float] = {}  # since when the condition of an active alert has not held
        self._forgot_s = 0.0

    def look(self) -> None:
        """Raise and resolve alerts. Raises RunError when the registry fails."""
        place, now_s = self._place, self._place.now_s()
        holding = rules.conditions(place, self._settings)
        found = {(name, subject): text for name, one in holding.items() for subject, text in one.items()}
        active = {(alert.rule, alert.subject): alert for alert in stored.active(place.db, place.fleet)}
        restated = {
            key
            for key, alert in active.items()
            if self._by_text(key[0]) and found.get(key, alert.text) != alert.text
        }
        raised = [(*key, text) for key, text in found.items() if key not in active or key in restated]
        absent = {
            alert.number: self._absent_s.get(alert.number, time.monotonic())
            for key, alert in active.items()
            if key not in found
        }
        resolved = {
            number
            for number, since_s in absent.items()
            if time.monotonic() - since_s >= self._settings.settle_s
        } | {active[key].number for key in restated}
        self._absent_s = {number: since_s for number, since_s in absent.items() if number not in resolved}
        if raised or resolved:
            stored.update_active(place.db, place.fleet, raised, resolved, now_s)
        if time.monotonic() - self._forgot_s > HOUR_S or not self._forgot_s:
            self._forgot_s = time.monotonic()
            stored.forget(place.db, place.fleet, now_s)
            registered_devices.forget_boots(place.db, place.fleet, now_s - DAY_S)

    def _by_text(self, rule: str) -> bool:
        """Whether a condition of the rule with another text is another alert."""
        return rule in self._settings.rules and KINDS[self._settings.rules[rule].kind or rule].by_text


class Sender:
    """Sends what is due on one channel; a failed delivery is repeated after a growing pause."""

    def __init__(self, place: RulePlace, settings: AlertSettings, channel: Channel) -> None:
        self._place, self._settings, self._channel = place, settings, channel
        self._failures, self._again_s = 0, 0.0

    def send(self) -> None:
        """Send what is due, in one message. Raises RunError when the registry fails."""
        if time.monotonic() < self._again_s:
            return
        place, name = self._place, self._channel.name
        now_s = place.now_s()
        before_s = int(now_s - self._settings.group_s)
        due = stored.claim(
            place.db, place.fleet, name, self._settings.rules_of(name), before_s=before_s, now_s=now_s
        )
        if not due:
            return
        sent = False
        try:
            self._channel.send(
                *message(place.fleet, due, self._settings.without_devices),
                good=all(one.event == "resolved" for one in due),
            )
            sent = True
        except EdgeFLError as error:
            pause_s = min(RETRY_S[0] * 2**self._failures, RETRY_S[1])
            self._again_s, self._failures = time.monotonic() + pause_s, self._failures + 1
            if self._failures == 1:
                print_status(f"{error.message}; {len(due)} alert{'s' * (len(due) > 1)} to send, trying again")
        finally:
            stored.settle(place.db, name, due, sent=sent)
        if sent and self._failures:
            print_status(f"alert channel {name!r}: works again")
            self._failures = 0


def message(fleet: str, due: Sequence[Due], without_devices: Collection[str] = ()) -> tuple[str, str]:
    """Title and body of a message: a line per rule, the devices of one rule together; a line per alert of rules `without_devices`."""
    counts = {event: sum(one.event == event for one in due) for event in ("raised", "resolved")}
    parts = [
        f"{count} alert{'s' * (count > 1)}" if event == "raised" else f"{count} resolved"
        for event, count in counts.items()
        if count
    ]
    lines = []
    ordered = sorted(due, key=lambda one: (one.event, one.alert.rule, one.alert.subject))

    def line_of(one: Due) -> tuple[str, str, str]:
        rule = one.alert.rule
        return one.event, rule, one.alert.subject if rule in without_devices else ""

    for (event, rule, _), group in groupby(ordered, key=line_of):
        found = [one.alert for one in group]
        head = f"{rule}{' resolved' * (event == 'resolved')}: "
        if len(found) == 1:
            lines.append(f"{head}{found[0].subject}: {found[0].text}")
        else:
            names = shortened([alert.subject for alert in found], MAX_NAMES)
            lines.append(f"{head}{len(found)}: {names} ({found[0].subject}: {found[0].text})")
    return f"Fleet {fleet}: {', '.join(parts)}", "\n".join(lines)


@contextmanager
def watching(
    registry: str, fleet: str, home: Path, identity: Path | None = None, *, poll_s: float = POLL_S
) -> Iterator[None]:
    """Watch a fleet, and record its history, while the block runs. Raises ConfigError for unusable settings."""
    with closing(Database.open(registry)) as db:
        folders = (home, *([] if "://" in registry else [Path(registry).parent]))
        place = RulePlace(db, fleet, folders, identity)
        settings = rules.load(rules.path_of(home, fleet), db, fleet)
        channels = [Channel.open(name, url) for name, url in settings.channels.items()]
        recorder = HistoryRecorder(db, fleet)
        steps = [
            Evaluator(place, settings).look,
            lambda: recorder.look(place.now_s()),
            *(Sender(place, settings, channel).send for channel in channels),
        ]
        closing_now = threading.Event()
        watchers = [
            threads.lasting(
                partial(_repeat, step, closing_now, poll_s), "edge-fl-alerts", stopped=closing_now
            )
            for step in steps
        ]
        for thread in watchers:
            thread.start()
        try:
            yield
        finally:
            closing_now.set()
            for thread in watchers:
                thread.join(CLOSE_S)


def _repeat(step: Callable[[], None], ending: threading.Event, poll_s: float) -> None:
    """Call a step every `poll_s`; an error is logged once until it is another one."""
    logged = ""
    while True:
        try:
            step()
            if logged:
                log.warning("alerts: works again")
            logged = ""
        except Exception as error:
            if str(error) != logged:
                log.warning("alerts: %s; trying again", error, exc_info=not isinstance(error, EdgeFLError))
            logged = str(error)
        if ending.wait(poll_s):
            return
