"""How the server gets to its broker: as itself, and beside that as a reader who only looks.

A broker that names its clients by their certificates throws the older of two with one name out. Whoever looks whether there is a server
already must not be mistaken for it, so the folders of the server's and the operator's identities hold a second one, `reader`, which may
not write. A device's identity is refused: its broker would show nothing, and throw the device out for it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from edge_fl.errors import ConfigError
from edge_fl.wire import identity
from edge_fl.wire.mqtt.loop import MqttLoop
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.transport import Listener, Packet
from server.mqtt.retained import Connect

READER = "reader"
NO_DEVICES = ("server", "reader", "operator", "worker")


def denied(folder: Path | str) -> Path | None:
    """Where the names stand that were revoked: beside the server's identity, if it has one."""
    return Path(folder) / identity.DENIED_FILE if folder else None


def connector(host: str, port: int = 0, folder: Path | str | None = None) -> Connect:
    """Makes clients of one broker. Raises ConfigError for an identity that cannot be used."""
    if folder and (who := identity.read(Path(folder))).role not in NO_DEVICES:
        raise ConfigError(
            f"{folder}: the identity of {who.name!r} ({who.role}), expected that of the server or the operator, which may see the"
            " whole fleet (runs/identities/operator)"
        )
    own_loop = cache(MqttLoop)
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
        """The server is known by its will; who has none only looks.

        The server has a loop of its own: its queue is bounded, and while it is full nobody else's connection may wait with it.
        """
        return MqttTransport(
            server if will else reader,
            client_id,
            will,
            deliver,
            loop=own_loop() if will else None,
            session_expiry_s=session_expiry_s,
            clean_start=clean_start,
        )

    return connect
