"""The log lines about messages whose signatures do not count: one per kind with its devices, then silence until it changes."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edge_fl.console.units import few
from edge_fl.failures import Failure
from edge_fl.secure.signatures import ForgedError
from edge_fl_server.mqtt.device_text import one_line
from edge_fl_server.mqtt.older_messages import Standing

log = logging.getLogger(__name__)

GATHER_S = 1.0  # devices of this time share the first line
PAUSE_S = 60.0  # between two lines of one kind
FORGET_S = 3600.0  # without a message of a kind; the next one is logged again
RULE = "they do not count; distrust the broker (docs/security.md, a compromised broker)"


@dataclass(slots=True)
class _Group:
    """The devices of one failure word, the number in its last line, when the next line is due, and when the last message came."""

    due_s: float
    seen_s: float = 0.0
    devices: set[str] = field(default_factory=set)
    logged: int = 0
    newest: str = ""


class SignatureLog:
    """Lines about one fleet. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._groups: dict[str, _Group] = {}
        self._outdated: set[str] = set()  # since all were replaced
        self._announced, self._reminded = 0, False
        self._due_s = 0.0

    def reject(self, device: str, error: ForgedError) -> None:
        """Note a message that does not count."""
        now_s = self._clock()
        group = self._groups.setdefault(error.why, _Group(now_s + GATHER_S))
        group.seen_s = now_s
        group.devices.add(device)
        group.newest = one_line(error.message)

    def advance(self, standing: Standing) -> None:
        """Log what is due."""
        now_s = self._clock()
        self._groups = {why: group for why, group in self._groups.items() if now_s - group.seen_s < FORGET_S}
        for why, group in self._groups.items():
            if len(group.devices) > group.logged and now_s >= group.due_s:
                log.warning(
                    "%s messages of %s; the newest: %s; %s", why, few(group.devices), group.newest, RULE
                )
                group.logged, group.due_s = len(group.devices), now_s + PAUSE_S
        self._advance_outdated(standing, now_s)

    def _advance_outdated(self, standing: Standing, now_s: float) -> None:
        if standing.found - self._outdated:
            self._due_s = now_s + GATHER_S
        self._outdated |= standing.found
        new = self._announced < len(self._outdated)
        if not self._outdated or (new and now_s < self._due_s):
            return
        if new:
            log.warning(
                "the broker delivers older messages of %s than it did before: it was restored from its last save, or replays"
                " them; they do not count, and the devices' next ones replace them",
                few(self._outdated),
            )
            self._announced, self._reminded, self._due_s = len(self._outdated), False, now_s + PAUSE_S
        if not standing.waiting:
            if replaced := self._outdated - self._replayed():
                log.warning(
                    "%s: newer messages have replaced the older ones; the broker was restored, and nothing is lost",
                    few(replaced),
                )
            self._outdated, self._announced = set(), 0
        elif not self._reminded and now_s >= self._due_s:
            log.warning("%s not back since the broker delivered older messages", few(standing.waiting))
            self._reminded = True

    def _replayed(self) -> set[str]:
        group = self._groups.get(Failure.REPLAYED)
        return group.devices if group else set()
