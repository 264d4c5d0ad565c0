"""A connected server: its connection with the fleet's lease, roster, inbox, assignments and journal."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from edge_fl.logs import LogLimit
from edge_fl.secure.signatures import Authorities
from edge_fl.wire.messages import Log
from edge_fl_server.mqtt.connection import ReceivedMessage, ServerConnection, SignsForDevices
from edge_fl_server.mqtt.devices.assignments import Assignments, clear_leftover_assignments
from edge_fl_server.mqtt.devices.roster import Roster
from edge_fl_server.mqtt.devices.settings import SettingsPublisher
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.reader import ServerConnect
from edge_fl_server.mqtt.statements import Statements
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
    def of(
        cls,
        connection: ServerConnection,
        journal: Journal,
        *,
        workers: bool = False,
        director: SignsForDevices | None = None,
        authorities: Authorities = (),
    ) -> "Server":
        """Register all handlers on a connection that is not open yet."""
        connection.statements = Statements(journal, authorities)
        connection.director = director
        connection.lines = journal.lines
        connection.on("log", partial(_log_device_line, journal.lines))
        return cls(
            connection=connection,
            roster=Roster(connection, journal),
            inbox=SharedInbox(connection, journal) if workers else Inbox(connection, journal),
            assignments=Assignments(connection),
            settings=SettingsPublisher(connection, journal),
            journal=journal,
        )


@contextmanager
def connected(
    connect: ServerConnect,
    journal: Journal,
    *,
    takeover: bool = False,
    yields: bool = False,
    workers: bool = False,
    director: SignsForDevices | None = None,
    authorities: Authorities = (),
) -> Iterator[Server]:
    """Connect a server and hold the lease of the journal's fleet; publish "offline" at the end. Raises ConnectError.

    A server that `yields` gives the fleet to one that does not. With `workers` other processes receive the reports
    (`edge_fl_server.mqtt.updates.workers`). `director` signs what is sent to single devices; `authorities` are the CAs of devices that
    sign their messages.
    """
    connection = ServerConnection(connect, journal.fleet, takeover=takeover, yields=yields, workers=workers)
    connection.registry = fleets.claim(journal.db, journal.fleet)
    server = Server.of(connection, journal, workers=workers, director=director, authorities=authorities)
    journal.on_failure = connection.end
    try:
        connection.open()
        journal.begin(connection.epoch)
        clear_leftover_assignments(connection, connect)
        yield server
    finally:
        server.inbox.stop()
        connection.close()


def _log_device_line(lines: LogLimit, received: ReceivedMessage) -> None:
    if isinstance(received.message, Log):
        device, line = received.address.device, received.message
        lines.write(log, LEVELS[line.level.upper()], device, "%s: %s", device, line.text)
