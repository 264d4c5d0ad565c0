"""A connected server: its connection with the fleet's lease, roster, inbox, assignments and journal."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from edge_fl.logs import LogLimit
from edge_fl.wire.messages import Log
from edge_fl_server.mqtt.connection import ReceivedMessage, ServerConnection
from edge_fl_server.mqtt.devices.assignments import Assignments, clear_leftover_assignments
from edge_fl_server.mqtt.devices.remote_settings import SettingsPublisher
from edge_fl_server.mqtt.devices.roster import Roster
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.updates.inbox import Inbox
from edge_fl_server.mqtt.updates.workers import SharedInbox
from edge_fl_server.registry import fleets

log = logging.getLogger(__name__)

LEVELS = logging.getLevelNamesMapping()


@dataclass(frozen=True)
class Server:
    """A connected server."""

    connection: ServerConnection
    roster: Roster
    inbox: Inbox
    assignments: Assignments
    settings: SettingsPublisher
    journal: Journal

    @classmethod
    def of(cls, connection: ServerConnection) -> "Server":
        """Register all handlers on a connection that is not open yet."""
        connection.on("log", partial(_log_device_line, connection.journal.lines))
        return cls(
            connection=connection,
            roster=Roster(connection),
            inbox=SharedInbox(connection) if connection.workers else Inbox(connection),
            assignments=Assignments(connection),
            settings=SettingsPublisher(connection),
            journal=connection.journal,
        )


@contextmanager
def connected(connection: ServerConnection) -> Iterator[Server]:
    """Open a server's connection and hold the lease of its fleet; publish "offline" at the end. Raises ConnectError.

    Where the connection leaves reports to `workers`, other processes receive them (`edge_fl_server.mqtt.updates.workers`).
    """
    journal = connection.journal
    connection.registry = fleets.claim(journal.db, journal.fleet)
    server = Server.of(connection)
    journal.on_failure = connection.end
    try:
        connection.open()
        journal.begin(connection.epoch)
        clear_leftover_assignments(connection)
        yield server
    finally:
        server.inbox.stop()
        connection.close()


def _log_device_line(lines: LogLimit, received: ReceivedMessage) -> None:
    if isinstance(received.message, Log):
        device, line = received.address.device, received.message
        lines.write(log, LEVELS[line.level.upper()], device, "%s: %s", device, line.text)
