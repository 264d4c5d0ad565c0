"""Assignments of devices: one retained message per device, numbered so that only the latest counts.

Numbers start with the server's epoch, so that they increase across restarts. At its start a server clears training assignments that an
earlier one left behind; "serve" assignments stay for devices that return later. With a director each is signed for its device; those that
stay are signed again before they expire.
"""

import threading
from typing import Any

from edge_fl.errors import ProtocolError
from edge_fl.wire.messages import Assignment, Mode, Request, decode
from edge_fl_server.mqtt.connection import ReceivedMessage, ServerConnection
from edge_fl_server.mqtt.connector import read_retained

ASSIGNMENTS_PER_EPOCH = 2**20
LASTING_MODES: frozenset[Mode] = frozenset({"serve"})


class Assignments:
    """The current assignment of every device that has one; not signed without a director of the connection."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self._current: dict[str, Assignment] = {}
        self._count = 0
        self._lock = threading.Lock()
        connection.on("req", self._on_request)
        connection.on("state", self._on_state)
        connection.on_connected(lambda _: self._republish_all())

    def assign(self, device: str, mode: Mode, **fields: Any) -> None:
        """Replace the assignment of a device."""
        with self._lock:
            self._count += 1
            version = self._connection.epoch * ASSIGNMENTS_PER_EPOCH + self._count
            self._publish(device, Assignment(version, mode, **fields))

    def republish(self, device: str) -> None:
        """Publish the current assignment again, with the same number: the device does nothing twice."""
        with self._lock:
            if assignment := self._current.get(device):
                self._publish(device, assignment)

    def refresh(self) -> None:
        """Sign and publish again what will expire soon, or what a replaced key signed."""
        for device, assignment in list(self._current.items()):
            if self._is_stale(assignment):
                self.republish(device)

    def current(self, device: str) -> Assignment | None:
        """The current assignment of a device."""
        return self._current.get(device)

    def withdraw_temporary(self) -> None:
        """Clear all assignments that have no meaning without this run."""
        with self._lock:
            for device, assignment in list(self._current.items()):
                if assignment.mode not in LASTING_MODES:
                    del self._current[device]
                    self._connection.clear_retained(self._connection.topics.down(device, "assignment"))

    def _republish_all(self) -> None:
        for device in list(self._current):
            self.republish(device)

    def _is_stale(self, assignment: Assignment) -> bool:
        director = self._connection.director
        return director is not None and director.is_stale(assignment)

    def _publish(self, device: str, assignment: Assignment) -> None:
        """Publish the assignment that is current from now on, signed again where it has to be."""
        if self._is_stale(assignment):
            lasts = assignment.mode in LASTING_MODES
            assignment = self._connection.signed("assignment", device, assignment, lasts=lasts)
        self._current[device] = assignment
        self._connection.publish(self._connection.topics.down(device, "assignment"), assignment, retain=True)

    def _on_state(self, received: ReceivedMessage) -> None:
        """Forget the assignment of a device that was removed: its state was cleared."""
        if received.message is None:
            with self._lock:
                self._current.pop(received.address.device, None)

    def _on_request(self, received: ReceivedMessage) -> None:
        if isinstance(received.message, Request) and received.message.kind == "assignment":
            self.republish(received.address.device)


def clear_leftover_assignments(connection: ServerConnection) -> int:
    """Clear the training assignments left by a server that crashed; return their number."""
    cleared = 0
    for topic, payload in read_retained(
        connection.connect, [connection.topics.down("+", "assignment")]
    ).items():
        try:
            lasting = decode(payload, Assignment).mode in LASTING_MODES
        except ProtocolError:
            lasting = False
        if not lasting:
            connection.clear_retained(topic)
            cleared += 1
    return cleared
