"""A transport over paho-mqtt (MQTT 5): it connects, keeps connecting, and loses no QoS 1 publication on the way.

paho speaks the protocol; the thread is a `MqttLoop`, which carries every client of the process. What is published waits in a queue of
ours and reaches paho a window at a time, so a lost connection costs nothing but the wait, order is kept, and the broker's receive
maximum is respected. Making subscriptions again after `Connected(session_present=False)` is for the owner, who knows which.
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

from edge_fl.errors import ConnectError, DeadlineError, ProtocolError
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.mqtt import tls
from edge_fl.wire.mqtt.client import BrokerLimits, State, broker_limits, make_client, publish_properties
from edge_fl.wire.mqtt.loop import READ, WRITE, MqttLoop, Timer, shared_loop
from edge_fl.wire.mqtt.outgoing import Filter, Outgoing, Publication
from edge_fl.wire.transport import (
    LIMITS,
    Connected,
    Disconnected,
    Event,
    Limits,
    Listener,
    Packet,
    Transport,
    hand_over,
    require_pattern,
    require_sendable,
)

log = logging.getLogger(__name__)

JITTER = random.Random()  # our own, so that nobody else's seeded draws move

Said = Properties | None

NOTHING_REFUSED: dict[str, str] = {}  # shared by the many clients to whom it applies
CLOSE_S = 2.0
# Refusals that trying again does not change: protocol version, client id, user or password, not authorised, banned, method.
FINAL_REASONS = frozenset({0x84, 0x85, 0x86, 0x87, 0x8A, 0x8C})


class MqttTransport(Transport):
    """One MQTT client. What is not public runs on the loop's thread, `_attempt` apart.

    `clean_start` forgets the broker's session at the first connection; `session_expiry_s` is how long it outlives the last one.
    `refused` are topics and patterns that the broker did not allow, with its reasons.
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
        limits: Limits = LIMITS,
    ) -> None:
        self.endpoint = endpoint
        self.client_id = client_id
        self.broker_limits: BrokerLimits | None = None
        self.refused: dict[str, str] = NOTHING_REFUSED
        self._deliver = deliver
        self._limits = limits
        self._loop = loop or shared_loop()
        # one for all that a caller may wait for: a client has to be small
        self._changed = threading.Condition()
        self._outgoing = Outgoing(limits.max_queued_bytes, self._changed)
        self._max_packet_bytes = limits.max_packet_bytes
        self._window = limits.max_inflight
        self._sending = self._closed = self._ended = False

        self._spread_s = 0.0
        self._state, self._attempts = State.WAITING, 0
        self._online_since = math.inf
        self._failure, self._refused = "no attempt yet", False
        self._timer: Timer | None = None
        self._socket: Any = None  # what the loop watches, and for which events
        self._events = READ

        self._client = make_client(
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
        self._client.on_publish = self._on_publish
        self._client.on_subscribe = self._on_subscribe
        self._client.on_unsubscribe = self._on_subscribe
        self._client.on_socket_close = lambda *_: self._unwatch()
        self._loop.call(self._begin)

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
            self._changed.wait_for(lambda: self._state in (State.ONLINE, State.OVER), deadline_s)
        if self._state is not State.ONLINE:
            raise ConnectError(
                f"broker {self.endpoint}: {self._failure} (attempt {self._attempts}, waited {deadline_s:g} s at most);"
                f" expected an MQTT broker that lets {self.client_id!r} in;"
                " start one with 'edge-fl broker up' or name another host and port"
            )

    def drain(self, deadline_s: float) -> None:
        if left := self._outgoing.drain(deadline_s, lambda: self._state is State.OVER):
            why = f"{left} publications not taken"
            if self._state is State.OVER:
                raise DeadlineError(f"broker {self.endpoint}: {why}: {self._failure}; not trying again")
            raise DeadlineError(f"broker {self.endpoint}: {why} in {deadline_s:g} s; they stay queued")

    def close(self, *, clean: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        self._loop.call(lambda: self._end(clean=clean))
        if not self._loop.is_current:
            with self._changed:
                self._changed.wait_for(lambda: self._ended, CLOSE_S)

    def _begin(self) -> None:
        if not self._closed:
            self._loop.enter(self._start)

    def _start(self) -> None:
        if self._closed:
            self._loop.leave()
            return
        self._state = State.CONNECTING
        self._attempts += 1
        # Resolver, TCP and TLS block, so the attempt gets a thread of its own.
        attempt = threading.Thread(target=self._attempt, name="edge-fl-connect", daemon=True)
        try:
            attempt.start()
        except RuntimeError as error:  # no more threads to be had
            self._lose(str(error))

    def _attempt(self) -> None:
        try:
            self._client.reconnect()
        except Exception as error:  # OSError and its many children, UnicodeError for a name that is none
            reason = tls.reason(error)
            self._loop.call(lambda: self._lose(reason))
        else:
            self._loop.call(self._greet)

    def _greet(self) -> None:
        """The socket is there and paho wants to say CONNECT."""
        self._state = State.GREETING
        self._socket, self._events = self._client.socket(), READ
        self._loop.watch(self._socket, self._ready)
        if self._closed:
            self._drop("closed")
            return
        self._after(self._limits.connect_timeout_s, lambda: self._drop("the broker does not answer"))
        self._flush()

    def _on_connect(self, _: Client, __: Any, flags: ConnectFlags, reason: ReasonCode, said: Said) -> None:
        if reason.is_failure:
            self._refused = reason.value in FINAL_REASONS
            self._lose(f"refused: {reason}")  # paho closes the socket
            return
        self.broker_limits = allowed = broker_limits(said)
        self._max_packet_bytes = min(self._limits.max_packet_bytes, allowed.max_packet_bytes)
        self._window = min(self._limits.max_inflight, allowed.receive_maximum)
        self._outgoing.resume(session_present=flags.session_present)
        self._loop.leave()
        self._online_since = time.monotonic()
        self._after(self._tick_s, self._tick)
        self._become(State.ONLINE)
        self._emit(Connected(flags.session_present))
        self._send_soon()

    def _on_disconnect(
        self, _: Client, __: Any, flags: DisconnectFlags, reason: ReasonCode, said: Said
    ) -> None:
        if flags.is_disconnect_packet_from_server:
            self._lose(str(reason))
        elif (
            self._state is State.GREETING and self.endpoint.ca
        ):  # TLS 1.3 tells us only now what it thinks of our certificate
            self._lose(tls.turned_away(self.endpoint))
        else:
            self._lose("connection lost")

    def _lose(self, reason: str) -> None:
        """The connection, or the attempt to make one, is over; whoever says so first is right."""
        before = self._state
        if before in (State.WAITING, State.OVER):
            return
        if before is not State.ONLINE:
            self._loop.leave()
        self._cancel()
        self._failure = reason
        if self._closed:
            self._become(State.OVER, ended=True)
        elif self._refused:
            log.error("%s: %s by %s; not trying again", self.client_id, self._failure, self.endpoint)
            self._become(State.OVER)
            self._emit(Disconnected(self._failure, final=True))
        else:
            self._become(State.WAITING)
            self._retry(was_online=before is State.ONLINE)

    def _retry(self, *, was_online: bool) -> None:
        if time.monotonic() - self._online_since > self._limits.stable_s:
            self._attempts = 0
        self._online_since = math.inf
        bound_s = min(self._limits.max_retry_s, self._limits.min_retry_s * 2.0 ** min(self._attempts, 32))
        bound_s = max(bound_s, self._spread_s) if was_online else bound_s
        # Full jitter, so that a fleet does not come back in step.
        self._after(JITTER.uniform(0, bound_s), self._begin)
        level = logging.WARNING if was_online or self._attempts == 1 else logging.DEBUG
        log.log(level, "%s: %s: %s; trying again", self.client_id, self.endpoint, self._failure)
        if was_online:
            self._emit(Disconnected(self._failure))

    def _end(self, *, clean: bool) -> None:
        if self._state is State.ONLINE and clean:
            self._send()
            self._client.disconnect()
            self._after(CLOSE_S, lambda: self._drop("closed"))  # for a socket that takes no more
            self._flush()
        elif self._state in (State.ONLINE, State.GREETING):
            self._drop("closed")
        else:  # an attempt that is under way ends in _greet or _lose
            self._cancel()
            self._become(self._state, ended=True)

    def _drop(self, why: str) -> None:
        """Ends the connection without a word, as a crash would."""
        self._unwatch()
        if sock := self._client.socket():
            sock.close()  # paho finds out when it connects again
        self._lose(why)

    def _become(self, state: State, *, ended: bool = False) -> None:
        with self._changed:
            self._state, self._ended = state, ended
            self._changed.notify_all()

    def _after(self, delay_s: float, call: Callable[[], object]) -> None:
        """One timer serves: the pause, the greeting's deadline, the keep-alive or the close, whichever the state asks for."""
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
                while (
                    self._socket and getattr(self._socket, "pending", int)()
                ):  # TLS has read it: no event will come
                    self._client.loop_read()
        except Exception as error:  # a packet that paho cannot parse
            log.debug("%s: from %s", self.client_id, self.endpoint, exc_info=True)
            self._drop(f"a packet that is none ({type(error).__name__}: {error})")
        self._flush()

    def _flush(self) -> None:
        """Writes what the socket takes, and asks to be called again for the rest."""
        if self._socket and self._client.want_write():
            self._client.loop_write()
        events = READ | WRITE if self._client.want_write() else READ
        if self._socket and events != self._events:
            self._events = events
            self._loop.assignment(self._socket, events, self._ready)

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
        """Hands the item to paho. Returns the message id of the answer to wait for, or None."""
        if isinstance(item, Filter):
            if item.wanted:
                return self._client.subscribe(item.pattern, qos=item.qos)[1]
            return self._client.unsubscribe(item.pattern)[1]
        if (packet := item.remaining()) is None:
            return None
        try:  # it may have been queued before the broker said what it takes
            require_sendable(packet, self._max_packet_bytes)
        except ProtocolError as error:
            log.error("%s: %s", self.client_id, error)
            return None
        properties = publish_properties(packet)
        info = self._client.publish(packet.topic, packet.payload, packet.qos, packet.retain, properties)
        return info.mid if packet.qos else None

    def _on_publish(self, _: Client, __: Any, message_id: int, reason: ReasonCode, said: Said) -> None:
        self._answered(message_id, reason)

    def _on_subscribe(
        self, _: Client, __: Any, message_id: int, reasons: list[ReasonCode], said: Said
    ) -> None:
        self._answered(message_id, reasons[0])

    def _answered(self, message_id: int, reason: ReasonCode) -> None:
        if item := self._outgoing.answered(message_id):
            if reason.is_failure:
                self.refused = {**self.refused, item.name: str(reason)}
                log.warning("%s: the broker refused %s: %s; dropped", self.client_id, item.name, reason)
            self._send_soon()

    def _on_message(self, _: Client, __: Any, message: MQTTMessage) -> None:
        said = message.properties
        self._emit(
            Packet(
                topic=message.topic,
                payload=bytes(message.payload),
                retain=message.retain,
                qos=message.qos,
                content_type=getattr(said, "ContentType", ""),
                expiry_s=getattr(said, "MessageExpiryInterval", None),
            )
        )

    def _emit(self, event: Event) -> None:
        if not self._closed:
            hand_over(event, self._deliver, self.client_id)
