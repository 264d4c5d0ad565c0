"""How devices get to their broker: one with its identity, many simulated ones each with its own, or all in plaintext."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from devices.rim import Connect
from edge_fl.errors import ConfigError
from edge_fl.wire import identity
from edge_fl.wire.endpoint import TLS_PORT, Endpoint
from edge_fl.wire.mqtt import MqttTransport
from edge_fl.wire.transport import Listener, Packet


def entry(endpoint: Endpoint) -> Connect:
    """Makes clients of one broker, all with the same certificate, if any."""
    return partial(MqttTransport, endpoint, tls=endpoint.tls_context())


def entries(host: str, port: int, folder: Path, count: int) -> tuple[tuple[str, ...], Connect]:
    """The first `count` devices whose identities are in `folder`, ascending, and what connects each as itself. Raises ConfigError."""
    folders = sorted(path.parent for path in folder.glob(f"*/{identity.KEY_FILE}"))
    found = [identity.read(path) for path in folders]
    devices = {each.name: each.endpoint(host, port or TLS_PORT) for each in found if each.role == "device"}
    if len(devices) < count:
        raise ConfigError(
            f"{folder}: {len(devices)} identities of devices, expected {count}; nothing was started"
            f" ('edge-fl fleet enrol --baked -n {count} --out {folder}' makes them)"
        )

    def connect(client_id: str, will: Packet | None, deliver: Listener, /) -> MqttTransport:
        return MqttTransport(devices[client_id], client_id, will, deliver)

    return tuple(sorted(devices)[:count]), connect
