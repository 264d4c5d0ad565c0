"""Configuration of paho clients, and the MQTT 5 properties of connections and publications."""

from __future__ import annotations

import functools
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from pathlib import Path
from typing import Any

from paho.mqtt.client import MQTT_CLEAN_START_FIRST_ONLY
from paho.mqtt.client import Client as PahoClient
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from edge_fl.errors import ConfigError
from edge_fl.wire.endpoint import Endpoint, Login, read_login
from edge_fl.wire.mqtt.tls import earliest, kept_fresh, secure
from edge_fl.wire.transport import Packet, TransportLimits

MAX_PACKET_BYTES = 268_435_455  # bounds of MQTT itself
RECEIVE_MAXIMUM = 65_535
LOGIN_REASONS = frozenset({0x86, 0x87})  # bad user name or password, not authorised


class State(Enum):
    """State of a connection."""

    WAITING = auto()  # for the next attempt
    CONNECTING = auto()
    HANDSHAKE = auto()  # CONNECT sent, CONNACK expected
    ONLINE = auto()
    ENDED = auto()  # no further attempt


@dataclass(frozen=True)
class BrokerLimits:
    """TransportLimits that the broker announced in its CONNACK; MQTT's own bounds where it announced none."""

    max_packet_bytes: int = MAX_PACKET_BYTES
    receive_maximum: int = RECEIVE_MAXIMUM


class MqttClient(PahoClient):
    """paho's client on sockets without Nagle's delay (88 ms a round trip otherwise), closed when TLS fails, which paho omits."""

    tls: Callable[[], ssl.SSLContext | None]
    since: datetime | None = None
    login: Path | Login | None = None

    def reconnect(self) -> MQTTErrorCode:
        """Connect with the current user name and password. Raises OSError, ConfigError."""
        if self.login:
            current = self.login if isinstance(self.login, Login) else read_login(self.login)
            self.username_pw_set(current.username, current.password)
        return super().reconnect()

    def _create_socket(self) -> socket.socket:
        sock = socket.create_connection((self.host, self.port), self.connect_timeout)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            context = self.tls()
            return secure(sock, context, self.host, self.since) if context else sock
        except BaseException:
            sock.close()
            raise


def make_client(
    endpoint: Endpoint,
    client_id: str,
    will: Packet | None,
    limits: TransportLimits,
    *,
    session_expiry_s: int,
    clean_start: bool,
    keepalive_s: int,
) -> MqttClient:
    """Create a client that is ready for `reconnect` and leaves writing to its owner. Raises ConfigError."""
    client = MqttClient(CallbackAPIVersion.VERSION2, client_id, protocol=MQTTProtocolVersion.MQTTv5)
    client.connect_timeout = limits.connect_timeout_s
    client.max_inflight_messages = 0  # no window in paho: `Outgoing` has one that respects the broker's limit
    client.on_socket_register_write = lambda *_: None  # without a callback paho would write inside `publish`
    if will:
        properties = _properties(will.content_type, will.expiry_s, PacketTypes.WILLMESSAGE)
        client.will_set(will.topic, will.payload, will.qos, will.retain, properties)
    client.tls = kept_fresh(endpoint)
    client.since = earliest(endpoint)
    client.login = endpoint.login
    properties = _connect_properties(session_expiry_s, limits.receive_maximum, limits.max_packet_bytes)
    clean = MQTT_CLEAN_START_FIRST_ONLY if clean_start else False
    try:
        client.connect_async(
            endpoint.host, endpoint.port, keepalive_s, clean_start=clean, properties=properties
        )
    except ValueError as error:
        raise ConfigError(f"broker {endpoint}: {error} expected a host and a port") from error
    return client


def broker_limits(properties: Properties | None) -> BrokerLimits:
    """Read the broker's limits from the properties of a CONNACK."""
    return BrokerLimits(
        max_packet_bytes=getattr(properties, "MaximumPacketSize", MAX_PACKET_BYTES),
        receive_maximum=getattr(properties, "ReceiveMaximum", RECEIVE_MAXIMUM),
    )


def publish_properties(packet: Packet) -> Properties | None:
    """Properties of a publication, if any; cached."""
    if not packet.content_type and packet.expiry_s is None:
        return None
    return _properties(packet.content_type, packet.expiry_s, PacketTypes.PUBLISH)


@functools.lru_cache(maxsize=256)  # paho's Properties take 7 KB, as much as the rest of a client
def _connect_properties(session_expiry_s: int, receive_maximum: int, max_packet_bytes: int) -> Properties:
    properties: Properties = _new_properties(PacketTypes.CONNECT)
    properties.SessionExpiryInterval = session_expiry_s
    properties.ReceiveMaximum = receive_maximum
    properties.MaximumPacketSize = max_packet_bytes
    return properties


@functools.lru_cache(maxsize=256)
def _properties(content_type: str, expiry_s: int | None, packet_type: int) -> Properties:
    properties: Properties = _new_properties(packet_type)
    if content_type:
        properties.ContentType = content_type
    if expiry_s is not None:
        properties.MessageExpiryInterval = expiry_s
    return properties


def _new_properties(packet_type: int) -> Any:
    """Typed Any: properties are attributes that the class does not declare."""
    return Properties(packet_type)  # type: ignore[no-untyped-call]


def login_hint(endpoint: Endpoint, reason: int) -> str:
    """What to check after a rejection for a wrong or missing login; empty for other reasons."""
    if reason not in LOGIN_REASONS or endpoint.cert:
        return ""
    if isinstance(endpoint.login, Path):
        return f" (username and password are in {endpoint.login})"
    return "" if endpoint.login else " (neither a certificate nor a user name was sent: expected an identity)"
