"""Messages that a broker delivers although their devices have sent later ones: those of a restored broker, and replayed ones.

A broker that was killed, or restored from a backup, begins with its last save: retained messages and queued ones of that time. They do not
count, but they are no attack. Three things distinguish them. They arrive before any current message of their device and kind on the same
connection. Every device that is there has lost its connection too: it connects again, which its next state "init" says. And that newer
message replaces them. So an older message after a current one is replayed; one at the beginning of a connection is outdated, until its
device turns out to have been connected all along, or does not get its newer message through `SETTLE_S` after it returned: then that one
was replayed as well. A device that does not return tells nothing.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edge_fl.wire.messages import Capability, DeviceState, Report

SETTLE_S = 30.0


@dataclass(slots=True)
class _Outdated:
    """A device with outdated messages of these `kinds`; `returned_s`: when a newer message of it arrived, infinity before."""

    kinds: set[str] = field(default_factory=set)
    returned_s: float = math.inf
    connected_again: bool = False


@dataclass(frozen=True)
class Standing:
    """What became of outdated messages since the last look: devices with new ones, those still open, and those that were replayed."""

    found: frozenset[str]
    waiting: frozenset[str]
    replayed: frozenset[str]


class OlderMessages:
    """The outdated messages of a fleet. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._current: set[tuple[str, str]] = (
            set()
        )  # (device, kind) with a current message on this connection
        self._open: dict[str, _Outdated] = {}
        self._found: set[str] = set()

    def connected(self) -> None:
        """Note a new connection: what arrives first may be older."""
        self._current.clear()
        for outdated in self._open.values():
            outdated.returned_s, outdated.connected_again = math.inf, False

    def is_outdated(self, device: str, kind: str) -> bool:
        """Note an older message; False if it was replayed."""
        if (device, kind) in self._current:
            return False
        self._open.setdefault(device, _Outdated()).kinds.add(kind)
        self._found.add(device)
        return True

    def current(
        self, device: str, kind: str, message: DeviceState | Capability | Report, *, newer: bool
    ) -> None:
        """Note a message that is not older; `newer`: it is not the last one that was received."""
        self._current.add((device, kind))
        if (outdated := self._open.get(device)) is None:
            return
        outdated.kinds.discard(kind)
        if newer:
            outdated.returned_s = min(outdated.returned_s, self._clock())
            outdated.connected_again |= isinstance(message, DeviceState) and message.status == "init"
        if not outdated.kinds and (outdated.connected_again or math.isinf(outdated.returned_s)):
            del self._open[device]

    def look(self) -> Standing:
        """What has changed since the last look."""
        before_s = self._clock() - SETTLE_S
        replayed = {device for device, outdated in self._open.items() if outdated.returned_s <= before_s}
        for device in replayed:
            del self._open[device]
        found, self._found = self._found, set()
        return Standing(frozenset(found), frozenset(self._open), frozenset(replayed))
