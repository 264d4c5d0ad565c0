"""Connect the server's clients to a broker: the server itself, and readers with a second identity.

A broker that names clients by their certificates disconnects the older of two clients with the same name. A reader must therefore not use
the server's identity, so the identity folders of server and operator contain a second one, `reader`, which may not publish. A device's
identity is not accepted: the broker would hide the fleet from it and disconnect the device.
"""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

from edge_fl.errors import ConfigError, ConnectError
from edge_fl.files.paths import text
from edge_fl.secure import signatures
from edge_fl.secure.signatures import Authorities
from edge_fl.wire import identity
from edge_fl.wire.mqtt.loop import MqttLoop
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.roles import PERSON_ROLES, may
from edge_fl.wire.transport import Listener, Packet
from edge_fl_server.mqtt.reader import ServerConnect

READER = "reader"
POLL_S = 0.1
SERVER_ROLES = ("server", "reader", "admin", "worker", *PERSON_ROLES)


def denied(folder: Path | str) -> Path | None:
    """The file with the names of revoked devices in the folder of the server's identity; None without an identity."""
    return Path(folder) / identity.DENIED_FILE if folder else None


def connector(host: str, port: int = 0, folder: Path | str | None = None) -> ServerConnect:
    """A function that connects clients to one broker. Raises ConfigError for an unusable identity."""
    if (own := identity.certificate_in(folder)) and own.role not in SERVER_ROLES:
        raise ConfigError(
            f"{folder}: the identity of {own.name!r} ({own.role}), expected that of the server or the operator, which may read the"
            " whole fleet (runs/identities/operator)"
        )
    server_loop = cache(MqttLoop)
    server = reader = identity.endpoint(host, port, folder)
    if folder and (Path(folder) / READER).exists():
        reader = identity.endpoint(host, port, Path(folder) / READER)

    def connect(
        client_id: str,
        will: Packet | None,
        deliver: Listener,
        *,
        session_expiry_s: int = 86400,
        clean_start: bool = False,
    ) -> MqttTransport:
        """Connect the server if there is a will, otherwise a reader.

        The server has its own event loop: its queue is bounded, and a full queue must not delay other connections.
        """
        return MqttTransport(
            server if will else reader,
            client_id,
            will,
            deliver,
            loop=server_loop() if will else None,
            session_expiry_s=session_expiry_s,
            clean_start=clean_start,
        )

    return connect


def operator_connector(host: str, port: int = 0, folder: Path | str | None = None) -> ServerConnect:
    """A function that connects a client which may query devices. Raises ConfigError for an identity that may not."""
    if (own := identity.certificate_in(folder)) and not (own.role == "admin" or may([own.role], "diagnose")):
        raise ConfigError(
            f"{folder}: the identity of {own.name!r} ({own.role}), expected that of an operator (runs/identities/operator)"
        )
    return partial(MqttTransport, identity.endpoint(host, port, folder))


@contextmanager
def sole_user(folder: Path | str | None, deadline_s: float, notify: Callable[[str], None]) -> Iterator[None]:
    """Wait until no other command of this machine uses an identity with a certificate, and keep others waiting during the block.

    Its name is the client id, so that the broker would end the other one's connection. Raises ConnectError after `deadline_s`.
    """
    own = identity.certificate_in(folder)
    if own is None:
        yield
        return
    until, told = time.monotonic() + deadline_s, False
    with (own.folder / identity.CA_FILE).open("rb") as file:  # stays where certificate and key are renewed
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > until:
                    raise ConnectError(
                        f"{text(own.folder)}: another command has used the identity {own.name} for {deadline_s:g} s; expected to be"
                        " the only one, or an identity for each person",
                        "the device was not asked",
                    ) from error
                if not told:
                    notify(f"waiting for another command with the identity {own.name}")
                told = True
                time.sleep(POLL_S)
        yield


def fleet_authorities(folder: Path | str | None) -> Authorities:
    """The CAs that sign the certificates of the fleet's devices; none without a certificate in the folder. Raises ConfigError."""
    return signatures.authorities(Path(folder)) if folder and identity.certificate_in(folder) else ()
