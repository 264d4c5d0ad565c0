"""What the server wants of each device: one retained message per device, numbered so that only the latest counts.

The number starts with the server's epoch, so that it grows over restarts too. Wants to train that an earlier server left behind are
withdrawn at the start; wants to serve a release stay, since a device that was away shall find them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from edge_fl.errors import ProtocolError
from edge_fl.wire.messages import Assignment, Mode, Request, decode
from server.mqtt.connection import Heard, ServerConnection
from server.mqtt.retained import Connect, read_retained

WANTS_PER_EPOCH = 2**20
LASTING: frozenset[Mode] = frozenset({"serve"})


class Assignments:
    """The current want of every device that was asked for something."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self._current: dict[str, Assignment] = {}
        self._count = 0
        self._lock = threading.Lock()
        connection.on("req", self._asked)
        connection.on_return(lambda _: self.say_again())

    def ask(self, device: str, mode: Mode, **fields: Any) -> None:
        """Replaces what is wanted of a device."""
        with self._lock:
            self._count += 1
            assignment = Assignment(self._connection.epoch * WANTS_PER_EPOCH + self._count, mode, **fields)
            self._current[device] = assignment
            self._publish(device, assignment)

    def again(self, device: str) -> None:
        """Says the current want once more, under its number: nothing is done twice."""
        with self._lock:
            if assignment := self._current.get(device):
                self._publish(device, assignment)

    def say_again(self) -> None:
        """Says every current want once more."""
        for device in list(self._current):
            self.again(device)

    def current(self, device: str) -> Assignment | None:
        """What is wanted of a device now."""
        return self._current.get(device)

    def withdraw(self, devices: Iterable[str]) -> None:
        """Clears the retained wants of these devices."""
        with self._lock:
            for device in devices:
                self._current.pop(device, None)
                self._connection.forget(self._connection.topics.assignment(device))

    def withdraw_passing(self) -> None:
        """Clears every want that has no meaning without this run."""
        self.withdraw(
            [device for device, assignment in self._current.items() if assignment.mode not in LASTING]
        )

    def _publish(self, device: str, assignment: Assignment) -> None:
        self._connection.say(self._connection.topics.assignment(device), assignment, retain=True)

    def _asked(self, heard: Heard) -> None:
        if isinstance(heard.message, Request) and heard.message.kind == "assignment":
            self.again(heard.address.device)


def withdraw_leftovers(connection: ServerConnection, connect: Connect) -> int:
    """Clears the wants to train that a server which was killed left behind; how many there were."""
    cleared = 0
    for topic, payload in read_retained(connect, [connection.topics.assignment("+")]).items():
        try:
            lasting = decode(payload, Assignment).mode in LASTING
        except ProtocolError:
            lasting = False
        if not lasting:
            connection.forget(topic)
            cleared += 1
    return cleared
