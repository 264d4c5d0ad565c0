"""Functions that connect devices to their broker: one with its certificate, many simulated ones, or all without certificates."""

from collections.abc import Callable
from pathlib import Path

from edge_fl.errors import ConfigError, DeadlineError
from edge_fl.files.paths import text
from edge_fl.wire import identity
from edge_fl.wire.endpoint import TLS_PORT, Endpoint
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.transport import Listener, Packet
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.runtime.certificates import Renewal, enrol
from edge_fl_devices.runtime.interfaces import DeviceConnect

ENROL_S = 60.0


def connector(endpoint: Endpoint, fleet: str) -> DeviceConnect:
    """Connect all clients with the endpoint's certificate or login, if any."""

    def connect(name: str, will: Packet | None, deliver: Listener, /) -> MqttTransport:
        return MqttTransport(endpoint, endpoint.client_id(fleet, name), will, deliver)

    return connect


def own_connector(
    host: str, port: int, folder: Path, fleet: str, notify: Callable[[str], None]
) -> tuple[DeviceConnect, Renewal]:
    """Connect one device with the identity in `folder`; also return the renewal of its certificate.

    A claim is exchanged for a certificate first, which is retried until it succeeds; `notify` receives each attempt's outcome.
    Raises ConfigError for an unusable identity, ConnectError if the claim is rejected.
    """
    device = identity.read(folder)
    while device.role == "claim":
        endpoint = device.endpoint(host, port or TLS_PORT)
        try:
            device = enrol(device, endpoint, fleet, connector(endpoint, fleet), ENROL_S)
        except DeadlineError as error:
            notify(f"{error}; trying again")
        else:
            notify(f"{device.name}: enrolled, certificate valid until {device.expires:%Y-%m-%d}")
    renewal = Renewal(device, fleet)
    return renewal.through(connector(device.endpoint(host, port or TLS_PORT), fleet)), renewal


def device_connector(
    config: DeviceConfig, notify: Callable[[str], None]
) -> tuple[DeviceConnect, Callable[[], None]]:
    """Connect one device with its settings; also return what is to be called periodically, for its certificate."""
    broker = config.broker
    if identity.certificate_in(broker.identity) is None:
        return connector(broker.endpoint, broker.fleet), lambda: None
    connect, renewal = own_connector(broker.host, broker.port, Path(broker.identity), broker.fleet, notify)
    return connect, renewal.tick


def fleet_connector(host: str, port: int, folder: Path, count: int) -> tuple[tuple[str, ...], DeviceConnect]:
    """Connect each of the first `count` devices whose identities are in `folder` with its own; also return their ids, ascending.

    Raises ConfigError if there are fewer.
    """
    identities = [identity.read(path.parent) for path in sorted(folder.glob(f"*/{identity.KEY_FILE}"))]
    devices = {
        each.name: each.endpoint(host, port or TLS_PORT) for each in identities if each.role == "device"
    }
    if len(devices) < count:
        raise ConfigError(
            f"{text(folder)}: {len(devices)} identities of devices, expected {count}"
            f" (create them: edge-fl fleet enrol --baked -n {count} --out {text(folder)})",
            consequence="nothing was started",
        )

    def connect(client_id: str, will: Packet | None, deliver: Listener, /) -> MqttTransport:
        return MqttTransport(devices[client_id], client_id, will, deliver)

    return tuple(sorted(devices)[:count]), connect
