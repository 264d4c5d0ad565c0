"""The connection of one device to its broker: it carries out effects of the wire, signs what a device signs, and counts bytes."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

from edge_fl.errors import ConnectError, EdgeFLError
from edge_fl.wire.messages import DeviceState, encode
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Disconnected, Event, Listener, Packet, Transport
from edge_fl_devices.agent import effects
from edge_fl_devices.agent.effects import Effect
from edge_fl_devices.remote.log_file import note
from edge_fl_devices.runtime.interfaces import DeviceConnect
from edge_fl_devices.runtime.signatures import StatementSigner

log = logging.getLogger(__name__)


class Connection:
    """denied: why the broker denies access, or "". wire_bytes: of topics and payloads in both directions. For any thread."""

    def __init__(self, device: str, topics: Topics, signer: StatementSigner) -> None:
        self.denied, self.wire_bytes = "", 0
        self._device, self._topics, self._signer = device, topics, signer
        self._transport: Transport | None = None

    def open(self, connect: DeviceConnect, will: DeviceState, deliver: Listener) -> None:
        """Connect in the background."""
        last_words = Packet(self._topics.state(self._device), encode(will), retain=True)
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
                log.info("%s: connection lost: %s", self._device, reason)
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
                _EFFECTS[type(effect)](self, effect)
            except (EdgeFLError, OSError) as error:
                log.warning("%s: %s failed: %s", self._device, type(effect).__name__, error)

    def _publish(self, effect: effects.Publish) -> None:
        note(self._device, effect.message)
        payload = encode(self._signer.signed(effect.message))
        self.publish([Packet(effect.topic, payload, effect.retain, expiry_s=effect.expiry_s)])

    def _subscribe(self, effect: effects.Subscribe) -> None:
        self._connected.subscribe(effect.pattern, qos=effect.qos)

    def _unsubscribe(self, effect: effects.Unsubscribe) -> None:
        self._connected.unsubscribe(effect.pattern)

    def _spread(self, effect: effects.SpreadReconnects) -> None:
        self._connected.spread(effect.over_s)

    @property
    def _connected(self) -> Transport:
        if self._transport:
            return self._transport
        raise ConnectError("not connected")


_EFFECTS: dict[type[Effect], Callable[[Connection, Any], None]] = {
    effects.Subscribe: Connection._subscribe,
    effects.Unsubscribe: Connection._unsubscribe,
    effects.SpreadReconnects: Connection._spread,
    effects.Publish: Connection._publish,
}
