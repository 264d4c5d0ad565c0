"""The connection of one device to its broker, and how it is made: with the device's certificate, those of a fleet, or without any.

It carries out effects of the wire, signs what a device signs, and counts bytes. `Reporting` sends reports through it and counts them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from edge_fl.errors import ConfigError, ConnectError, DeadlineError, EdgeFLError
from edge_fl.files.paths import text
from edge_fl.wire import identity
from edge_fl.wire.endpoint import TLS_PORT, Endpoint
from edge_fl.wire.messages import DeviceState, Report, encode
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import (
    SAFETENSORS,
    Connect,
    Disconnected,
    Event,
    Listener,
    Packet,
    Transport,
    chunk_packets,
)
from edge_fl_devices.agent import effects
from edge_fl_devices.agent.effects import Effect, Send
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.remote.log_file import note
from edge_fl_devices.runtime.certificates import Renewal, enrol
from edge_fl_devices.runtime.signatures import StatementSigner
from edge_fl_devices.storage.store import Store

log = logging.getLogger(__name__)
ENROL_S = 60.0


class Connection:
    """denied: why the broker denies access, or "". wire_bytes: of topics and payloads in both directions. For any thread."""

    def __init__(self, device: str, topics: Topics, signer: StatementSigner) -> None:
        self.denied, self.wire_bytes = "", 0
        self._device, self._topics, self._signer = device, topics, signer
        self._transport: Transport | None = None

    def open(self, connect: Connect, will: DeviceState, deliver: Listener) -> None:
        """Connect in the background."""
        last_words = Packet(self._topics.up(self._device, "state"), encode(will), retain=True)
        self._transport = connect(self._device, last_words, deliver)

    def wait(self, deadline_s: float) -> None:
        """Wait for the broker. Raises ConnectError; connecting continues in the background."""
        self._connected.wait_connected(deadline_s)

    def close(self, deadline_s: float) -> None:
        """Wait until all publications have left, then disconnect cleanly."""
        transport, self._transport = self._transport, None
        if transport is None:
            return
        try:
            transport.drain(deadline_s)
        except EdgeFLError as error:
            log.warning("%s: unsent messages are lost: %s", self._device, error.message)
        transport.close()

    def cut(self) -> None:
        """Cut the connection as a power failure would: the broker publishes the will."""
        transport, self._transport = self._transport, None
        if transport:
            transport.close(clean=False)

    def observe(self, event: Event) -> None:
        """Note what an event of the connection says about it."""
        match event:
            case Packet(topic, payload):
                self.wire_bytes += len(topic) + len(payload)
            case Disconnected(reason, final):
                if not final:
                    log.warning("%s: %s; connecting again", self._device, event)
                self.denied = reason if final else ""

    def publish(self, packets: Iterable[Packet]) -> None:
        """Publish packets in this order. Raises EdgeFLError."""
        for packet in packets:
            self.wire_bytes += len(packet.topic) + len(packet.payload)
            self._connected.publish(packet)

    def carry_out(self, requested: Iterable[Effect]) -> None:
        """Subscribe, unsubscribe and publish. An effect that fails is logged."""
        for effect in requested:
            try:
                self._carry_out(effect)
            except (EdgeFLError, OSError) as error:
                log.warning("%s: %s failed: %s", self._device, type(effect).__name__, error)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case effects.Publish(topic, message, retain, expiry_s):
                note(self._device, message)
                self.publish([Packet(topic, encode(self._signer.signed(message)), retain, expiry_s=expiry_s)])
            case effects.Subscribe(pattern, qos):
                self._connected.subscribe(pattern, qos=qos)
            case effects.Unsubscribe(pattern):
                self._connected.unsubscribe(pattern)
            case effects.SpreadReconnects(over_s):
                self._connected.spread(over_s)

    @property
    def _connected(self) -> Transport:
        if self._transport:
            return self._transport
        raise ConnectError("not connected")


def connector(endpoint: Endpoint, fleet: str) -> Connect:
    """Connect all clients with the endpoint's certificate or login, if any."""

    def connect(name: str, will: Packet | None, deliver: Listener, /) -> MqttTransport:
        return MqttTransport(endpoint, endpoint.client_id(fleet, name), will, deliver)

    return connect


def own_connector(
    host: str, port: int, folder: Path, fleet: str, notify: Callable[[str], None]
) -> tuple[Connect, Renewal]:
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
) -> tuple[Connect, Callable[[], None]]:
    """Connect one device with its settings; also return what is to be called periodically, for its certificate."""
    broker = config.broker
    if identity.certificate_in(broker.identity) is None:
        return connector(broker.endpoint, broker.fleet), lambda: None
    connect, renewal = own_connector(broker.host, broker.port, Path(broker.identity), broker.fleet, notify)
    return connect, renewal.tick


def fleet_connector(host: str, port: int, folder: Path, count: int) -> tuple[tuple[str, ...], Connect]:
    """Connect each of the first `count` devices whose identities are in `folder` with its own; also return their ids, ascending.

    Raises ConfigError if there are fewer.
    """
    if certificate := identity.certificate_in(folder) if (folder / identity.KEY_FILE).exists() else None:
        raise ConfigError(
            f"--identity {text(folder)}: a certificate for {certificate.name!r} alone; expected a folder with one per device, or with"
            " username and password",
            consequence="nothing was started",
        )
    identities = [identity.read(path.parent) for path in sorted(folder.glob(f"*/{identity.KEY_FILE}"))]
    devices = {
        each.name: each.endpoint(host, port or TLS_PORT) for each in identities if each.role == "device"
    }
    if len(devices) < count:
        raise ConfigError(
            f"{text(folder)}: {len(devices)} identities of devices, expected {count}"
            f" (create them: edge-fl fleet enrol --baked --count {count} --out {text(folder)})",
            consequence="nothing was started",
        )

    def connect(client_id: str, will: Packet | None, deliver: Listener, /) -> MqttTransport:
        return MqttTransport(devices[client_id], client_id, will, deliver)

    return tuple(sorted(devices)[:count]), connect


class Reporting:
    """last: the last report sent, by kind. totals: sums over all reports. acknowledged: acknowledgements by status."""

    def __init__(self, device: str, topics: Topics, store: Store, signer: StatementSigner) -> None:
        self.last: dict[str, Report] = {}
        self.totals: Counter[str] = Counter()
        self.acknowledged: Counter[str] = Counter()
        self._device, self._topics, self._store, self._signer = device, topics, store, signer

    def packets(self, effect: Send) -> Iterator[Packet]:
        """Yield the packets of a report, the chunks of its blob first."""
        parcel, expiry_s = effect.parcel, effect.expiry_s
        report = parcel.report
        self._count(report)
        if blob := report.blob:
            topics = partial(self._topics.up, self._device, "blob", report.id)
            payload = self._store.blob(report.id) or b""
            yield from chunk_packets(
                topics, payload, blob.chunk_bytes, content_type=SAFETENSORS, expiry_s=expiry_s
            )
        topic = self._topics.up(self._device, "rpt", parcel.run_id, parcel.round)
        yield Packet(topic, encode(self._signer.signed(report)), expiry_s=expiry_s)

    def _count(self, report: Report) -> None:
        """Add a report to the totals, once."""
        if (last := self.last.get(report.kind)) and last.id == report.id:
            return
        self.last[report.kind] = report
        self.totals.update(
            reports=1,
            bytes_down=report.bytes_down,
            bytes_up=report.bytes_up,
            milliseconds=round(1000 * report.seconds),
        )
