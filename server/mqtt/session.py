"""A server on its broker: the lease of a fleet, who is there, what is asked, what is answered, and the registry that it all goes into."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from edge_fl.wire.messages import Log
from server.mqtt.connection import Heard, ServerConnection
from server.mqtt.devices.assignments import Assignments, withdraw_leftovers
from server.mqtt.devices.roster import Roster
from server.mqtt.journal import Journal
from server.mqtt.retained import Connect
from server.mqtt.updates.inbox import Inbox
from server.mqtt.updates.workers import SharedInbox

log = logging.getLogger(__name__)

LEVELS = logging.getLevelNamesMapping()


@dataclass(frozen=True)
class Server:
    """A connected server."""

    connection: ServerConnection
    roster: Roster
    inbox: Inbox
    assignments: Assignments
    journal: Journal


@contextmanager
def connected(
    connect: Connect, journal: Journal, *, takeover: bool = False, workers: bool = False
) -> Iterator[Server]:
    """A server that has the lease of a journal's fleet; says goodbye at the end. Raises ConnectError.

    With `workers` other processes take the reports (`server.mqtt.updates.workers`).
    """
    connection = ServerConnection(connect, journal.fleet, takeover=takeover, workers=workers)
    connection.on("log", _device_says)
    inbox = SharedInbox(connection, journal) if workers else Inbox(connection, journal)
    server = Server(connection, Roster(connection, journal), inbox, Assignments(connection), journal)
    try:
        connection.open()
        journal.begin(connection.epoch)
        withdraw_leftovers(connection, connect)
        yield server
    finally:
        if isinstance(inbox, SharedInbox):
            inbox.stop()
        connection.close()


def _device_says(heard: Heard) -> None:
    if isinstance(heard.message, Log):
        device = heard.address.device
        log.log(
            LEVELS[heard.message.level.upper()],
            "%s: %s",
            device,
            heard.message.text,
            extra={"device": device},
        )
