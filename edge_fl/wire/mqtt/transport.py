"""MQTT 5 transport over paho-mqtt: reconnects, and loses no QoS 1 publication.

paho implements the protocol; one `MqttLoop` thread serves every client of the process. Publications wait in an `Outgoing` queue and reach
paho one window at a time: after a lost connection nothing is lost, order is kept, and the broker's receive maximum is respected. After
`Connected(session_present=False)` the owner must make its subscriptions again.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from paho.mqtt.client import Client, ConnectFlags, DisconnectFlags, MQTTMessage
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edge_fl import threads
from edge_fl.errors import ConnectError, DeadlineError, ProtocolError
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.mqtt import client, tls
from edge_fl.wire.mqtt.client import BrokerLimits, State
from edge_fl.wire.mqtt.loop import READ, WRITE, MqttLoop, Timer, shared_loop
from edge_fl.wire.mqtt.outgoing import Filter, Outgoing, Publication
from edge_fl.wire.transport import (
    LIMITS,
    Connected,
    Disconnected,
    Event,
    Listener,
    Packet,
    Transport,
    TransportLimits,
    deliver_event,
    require_pattern,
    require_sendable,
)

log = logging.getLogger(__name__)

JITTER = random.Random()  # separate from the global generator, so that seeded draws elsewhere are unaffected

ReceivedProperties = Properties | None

NONE_DENIED: dict[str, str] = {}  # shared by all clients without denied topics
CLOSE_S = 2.0
# Rejections that a retry does not change: protocol version, client id, user or password, not authorised, banned, method.
FINAL_REASONS = frozenset({0x84, 0x85, 0x86, 0x87, 0x8A, 0x8C})
# Features that the broker lacks: retained messages, QoS 1, shared subscriptions, wildcards.
UNSUPPORTED_REASONS = frozenset({0x9A, 0x9B, 0x9E, 0xA2})
GIVEN_REASONS = {
    0x8B: "the broker shuts down",
    0x8E: "another connection of this name took over",
    0x98: "the broker's operator ended the connection",
    0x9C: "the broker asks to use another one",
    0x9D: "the broker has moved",
}
"""What a broker gives as the reason when it ends a connection, in words; all others as MQTT names them."""
PLANNED = frozenset(words for reason, words in GIVEN_REASONS.items() if reason != 0x8E)


class MqttTransport(Transport):
    """One MQTT client. Private methods run on the loop's thread, except `_attempt`.

    `clean_start` discards the broker's session at the first connection; `session_expiry_s` is its lifetime after the last one. `denied`
    maps topics and patterns that the broker did not allow to its reasons.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        client_id: str,
        will: Packet | None,
        deliver: Listener,
        *,
        loop: MqttLoop | None = None,
        session_expiry_s: int = 86400,
        clean_start: bool = False,
        keepalive_s: int = 30,
        limits: TransportLimits = LIMITS,
    ) -> None:
        self.endpoint = endpoint
        self.client_id = client_id
        self.broker_limits: BrokerLimits | None = None
        self.denied: dict[str, str] = NONE_DENIED
        self._deliver = deliver
        self._limits = limits
        self._loop = loop or shared_loop()
        # one condition for everything a caller may wait for, because clients must be small
        self._changed = threading.Condition()
        self._outgoing = Outgoing(limits.max_queued_bytes, self._changed)
        self._max_packet_bytes = limits.max_packet_bytes
        self._window = limits.max_inflight
        self._sending = self._closed = self._ended = self._awaited = False

        self._passing = (
            session_expiry_s == 0
        )  # a client for one question, whose owner reports what comes of it
        self._spread_s = 0.0
        self._state, self._attempts = State.WAITING, 0
        self._online_since = math.inf
        self._failure, self._rejected = "no attempt yet", False
        self._timer: Timer | None = None
        self._socket: Any = None  # the socket watched by the loop, and its events
        self._events = READ

        self._client = client.make_client(
            endpoint,
            client_id,
            will,
            limits,
            session_expiry_s=session_expiry_s,
            clean_start=clean_start,
            keepalive_s=keepalive_s,
        )
        self._client.on_connect = self._on_connect
        self._client.on_disconnect = self._on_disconnect
        self._client.on_message = self._on_message
        self._client.on_publish = lambda _, __, id, reason, ___: self._acknowledged(id, reason)
        self._client.on_subscribe = lambda _, __, id, reasons, ___: self._acknowledged(id, reasons[0])
        self._client.on_unsubscribe = self._client.on_subscribe
        self._client.on_socket_close = lambda *_: self._unwatch()
        self._loop.call(self._queue_attempt)

    def publish(self, packet: Packet) -> None:
        require_sendable(packet, self._max_packet_bytes)
        if self._closed or (not packet.qos and self._state is not State.ONLINE):
            return
        self._outgoing.publish(packet)
        self._send_soon()

    def subscribe(self, pattern: str, *, qos: int = 1) -> None:
        require_pattern(pattern)
        if not self._closed:
            self._outgoing.filter(pattern, wanted=True, qos=qos)
            self._send_soon()

    def unsubscribe(self, pattern: str) -> None:
        if not self._closed:
            self._outgoing.filter(pattern, wanted=False)
            self._send_soon()

    def spread(self, over_s: float) -> None:
        self._spread_s = over_s

    def wait_connected(self, deadline_s: float) -> None:
        with self._changed:
            self._awaited = True
            self._changed.wait_for(lambda: self._state in (State.ONLINE, State.ENDED), deadline_s)
            self._awaited = False
        if self._rejected:
            raise ConnectError(
                f"broker {self.endpoint} does not accept {self.client_id!r}: {self._failure}", "not connected"
            )
        if self._state is not State.ONLINE:
            accepts = "" if self._passing else f" accepts {self.client_id!r}"
            raise ConnectError(
                f"no MQTT broker at {self.endpoint}{accepts}: {self._failure} (tried for {deadline_s:g} s);"
                " start one with 'edge-fl broker up' or give another host and port"
            )

    def drain(self, deadline_s: float) -> None:
        if left := self._outgoing.drain(deadline_s, lambda: self._state is State.ENDED):
            text = f"{left} publications not acknowledged"
            if self._state is State.ENDED:
                raise DeadlineError(f"broker {self.endpoint}: {text}: {self._failure}", "not trying again")
            raise DeadlineError(f"broker {self.endpoint}: {text} within {deadline_s:g} s", "they stay queued")

    def close(self, *, clean: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.call(lambda: self._end(clean=clean))
        if not self._loop.is_current:
            with self._changed:
                self._changed.wait_for(lambda: self._ended, CLOSE_S)

    def _queue_attempt(self) -> None:
        if not self._closed:
            self._loop.queue_handshake(self._start_attempt)

    def _start_attempt(self) -> None:
        if self._closed:
            self._loop.end_handshake()
            return
        self._state = State.CONNECTING
        self._attempts += 1
        # resolver, TCP and TLS block, so each attempt has its own thread
        attempt = threads.once(self._attempt, "edge-fl-connect")
        try:
            attempt.start()
        except RuntimeError as error:  # no more threads available
            self._lose(str(error))

    def _attempt(self) -> None:
        try:
            self._client.reconnect()
        except Exception as error:  # OSError and its subclasses, UnicodeError for an invalid host name
            reason = tls.explain(error, self.endpoint)
            self._loop.call(lambda: self._lose(reason))
        else:
            self._loop.call(self._on_socket)

    def _on_socket(self) -> None:
        """The socket is connected and paho has a CONNECT to send."""
        self._state = State.HANDSHAKE
        self._socket, self._events = self._client.socket(), READ
        self._loop.watch(self._socket, self._ready)
        if self._closed:
            self._abort("closed")
            return
        self._after(self._limits.connect_timeout_s, lambda: self._abort("the broker does not answer"))
        self._flush()

    def _on_connect(
        self, _: Client, __: Any, flags: ConnectFlags, reason: ReasonCode, properties: ReceivedProperties
    ) -> None:
        if reason.is_failure:
            self._rejected = reason.value in FINAL_REASONS
            hint = client.login_hint(self.endpoint, reason.value)
            self._lose(f"rejected: {reason}{hint}")  # paho closes the socket
            return
        self.broker_limits = allowed = client.broker_limits(properties)
        self._max_packet_bytes = min(self._limits.max_packet_bytes, allowed.max_packet_bytes)
        self._window = min(self._limits.max_inflight, allowed.receive_maximum)
        self._outgoing.resume(session_present=flags.session_present)
        self._loop.end_handshake()
        self._online_since = time.monotonic()
        self._after(self._tick_s, self._tick)
        self._set_state(State.ONLINE)
        self._emit(Connected(flags.session_present))
        self._send_soon()

    def _on_disconnect(
        self, _: Client, __: Any, flags: DisconnectFlags, reason: ReasonCode, properties: ReceivedProperties
    ) -> None:
        if flags.is_disconnect_packet_from_server:
            self._rejected = reason.value in UNSUPPORTED_REASONS
            self._lose(GIVEN_REASONS.get(reason.value, str(reason)))
        elif self._state is State.HANDSHAKE and self.endpoint.uses_tls:
            # TLS 1.3 reports a rejected certificate only now
            self._lose(tls.explain_rejection(self.endpoint))
        else:
            self._lose("connection lost")

    def _lose(self, reason: str) -> None:
        """The connection or the attempt to connect ended; the first reason given counts."""
        before = self._state
        if before in (State.WAITING, State.ENDED):
            return
        if before is not State.ONLINE:
            self._loop.end_handshake()
        self._cancel()
        is_new, self._failure = reason != self._failure, reason
        if self._closed:
            self._set_state(State.ENDED, ended=True)
        elif self._rejected:
            if not self._awaited:  # else `wait_connected` reports it
                log.error("%s: %s: %s; not trying again", self.client_id, self.endpoint, self._failure)
            self._set_state(State.ENDED)
            self._emit(Disconnected(self._failure, final=True))
        else:
            self._set_state(State.WAITING)
            self._retry(was_online=before is State.ONLINE, is_new=is_new)

    def _retry(self, *, was_online: bool, is_new: bool) -> None:
        if time.monotonic() - self._online_since > self._limits.stable_s:
            self._attempts = 0
        self._online_since = math.inf
        bound_s = min(self._limits.max_retry_s, self._limits.min_retry_s * 2.0 ** min(self._attempts, 32))
        bound_s = max(bound_s, self._spread_s) if was_online else bound_s
        # Full jitter, so that clients do not reconnect in step.
        self._after(JITTER.uniform(0, bound_s), self._queue_attempt)
        if was_online:
            self._emit(Disconnected(self._failure, planned=self._failure in PLANNED))
        else:
            level = logging.WARNING if is_new and not self._passing else logging.DEBUG
            log.log(level, "%s: %s: %s; trying again", self.client_id, self.endpoint, self._failure)

    def _end(self, *, clean: bool) -> None:
        if self._state is State.ONLINE and clean:
            self._send()
            self._client.disconnect()
            self._after(CLOSE_S, lambda: self._abort("closed"))  # if the socket accepts no more data
            self._flush()
        elif self._state in (State.ONLINE, State.HANDSHAKE):
            self._abort("closed")
        else:  # an attempt in progress ends in _on_socket or _lose
            self._cancel()
            self._set_state(self._state, ended=True)

    def _abort(self, why: str) -> None:
        """End the connection without DISCONNECT, as a crash would."""
        self._unwatch()
        if sock := self._client.socket():
            sock.close()  # paho notices at its next connect
        self._lose(why)

    def _set_state(self, state: State, *, ended: bool = False) -> None:
        with self._changed:
            self._state, self._ended = state, ended
            self._changed.notify_all()

    def _after(self, delay_s: float, call: Callable[[], object]) -> None:
        """Start the single timer; its meaning depends on the state: retry pause, handshake timeout, keep-alive or close."""
        self._cancel()
        self._timer = self._loop.later(delay_s, call)

    def _cancel(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    @property
    def _tick_s(self) -> float:
        return max(self._client.keepalive / 4, 0.25)

    def _tick(self) -> None:
        self._after(self._tick_s, self._tick)
        self._client.loop_misc()
        self._flush()

    def _ready(self, events: int) -> None:
        try:
            if events & READ:
                self._client.loop_read()
                # data buffered by TLS causes no event
                while self._socket and getattr(self._socket, "pending", int)():
                    self._client.loop_read()
        except Exception as error:  # a packet that paho cannot parse
            log.debug("%s: from %s", self.client_id, self.endpoint, exc_info=True)
            self._abort(f"invalid packet ({type(error).__name__}: {error})")
        self._flush()

    def _flush(self) -> None:
        """Write as much as the socket accepts and watch for WRITE if data is left."""
        if self._socket and self._client.want_write():
            self._client.loop_write()
        events = READ | WRITE if self._client.want_write() else READ
        if self._socket and events != self._events:
            self._events = events
            self._loop.set_events(self._socket, events, self._ready)

    def _unwatch(self) -> None:
        if self._socket:
            self._loop.unwatch(self._socket)
            self._socket = None

    def _send_soon(self) -> None:
        if not self._sending:
            self._sending = True
            self._loop.call(self._send)

    def _send(self) -> None:
        self._sending = False
        if self._state is State.ONLINE:
            self._outgoing.send(self._window, self._send_one)
            self._flush()

    def _send_one(self, item: Publication | Filter) -> int | None:
        """Pass the item to paho. Returns the message id to be acknowledged, or None."""
        if isinstance(item, Filter):
            if item.wanted:
                return self._client.subscribe(item.pattern, qos=item.qos)[1]
            return self._client.unsubscribe(item.pattern)[1]
        if (packet := item.remaining()) is None:
            return None
        try:  # it may have been queued before the broker's limit was known
            require_sendable(packet, self._max_packet_bytes)
        except ProtocolError as error:
            log.error("%s: %s", self.client_id, error)
            return None
        properties = client.publish_properties(packet)
        info = self._client.publish(packet.topic, packet.payload, packet.qos, packet.retain, properties)
        return info.mid if packet.qos else None

    def _acknowledged(self, message_id: int, reason: ReasonCode) -> None:
        with self._changed:  # a `drain` that this ends finds `denied` complete
            item = self._outgoing.acknowledged(message_id)
            if item and reason.is_failure:
                self.denied = {**self.denied, item.name: str(reason)}
                log.warning("%s: the broker denied %s: %s; dropped", self.client_id, item.name, reason)
        if item:
            self._send_soon()

    def _on_message(self, _: Client, __: Any, message: MQTTMessage) -> None:
        properties = message.properties
        self._emit(
            Packet(
                topic=message.topic,
                payload=bytes(message.payload),
                retain=message.retain,
                qos=message.qos,
                content_type=getattr(properties, "ContentType", ""),
                expiry_s=getattr(properties, "MessageExpiryInterval", None),
            )
        )

    def _emit(self, event: Event) -> None:
        if not self._closed:
            deliver_event(event, self._deliver, self.client_id)
