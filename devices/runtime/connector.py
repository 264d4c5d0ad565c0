"""How devices get to their broker: one with its identity, many simulated ones each with its own, or all in plaintext."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from devices.runtime.certificates import Renewal, enrol
from devices.runtime.interfaces import DeviceConnect
from edge_fl.errors import ConfigError, DeadlineError
from edge_fl.wire import identity
from edge_fl.wire.endpoint import TLS_PORT, Endpoint
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.transport import Listener, Packet

ENROL_S = 60.0


def connector(endpoint: Endpoint) -> DeviceConnect:
    """Makes clients of one broker, all with the same certificate, if any."""
    return partial(MqttTransport, endpoint)


def own_connector(
    host: str, port: int, folder: Path, fleet: str, say: Callable[[str], None]
) -> tuple[DeviceConnect, Renewal]:
    """How one device connects with the identity in `folder`, and what renews it. A claim is turned into one first, however long it takes.

    Raises ConfigError for what cannot be used, ConnectError when the claim is refused.
    """
    found = identity.read(folder)
    while found.role == "claim":
        endpoint = found.endpoint(host, port or TLS_PORT)
        try:
            found = enrol(found, endpoint, fleet, connector(endpoint), ENROL_S)
        except DeadlineError as error:
            say(f"{error}; trying again")
        else:
            say(f"{found.name}: enrolled, until {found.expires:%Y-%m-%d}; the claim is gone")
    renewal = Renewal(found, fleet)
    return renewal.through(connector(found.endpoint(host, port or TLS_PORT))), renewal


def fleet_connector(host: str, port: int, folder: Path, count: int) -> tuple[tuple[str, ...], DeviceConnect]:
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
