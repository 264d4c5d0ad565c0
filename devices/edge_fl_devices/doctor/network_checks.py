"""Checks of the connection to the broker, in order: name, port, TLS, sign-in, and access to the device's own topics."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator

from edge_fl.errors import ConfigError, EdgeFLError
from edge_fl.files.paths import text
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.messages import Echo, Log, encode
from edge_fl.wire.mqtt import tls
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Event, Packet
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.doctor.device_checks import DeviceCheck, is_running

WAIT_S = 10.0


def network(config: DeviceConfig) -> Iterator[DeviceCheck]:
    """Run the checks until the first failure."""
    try:
        endpoint = config.broker.endpoint
    except ConfigError as error:
        remedy = "flash the device again, or enrol it: edge-fl fleet enrol"
        yield DeviceCheck("identity", "failed", str(error), remedy)
        return
    for check in (_name, _port, _tls):
        result = check(endpoint)
        yield result
        if result.state == "failed":
            return
    if is_running(config):
        remedy = "to run these checks, stop it: sudo systemctl stop edge-fl"
        yield DeviceCheck(
            "sign-in and topics", "skipped", "the agent is running and holds the connection", remedy
        )
        return
    yield from _topics(config, endpoint)


def _name(endpoint: Endpoint) -> DeviceCheck:
    try:
        addresses = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        remedy = "check the network, DNS, and broker.host in the settings"
        return DeviceCheck("name", "failed", f"{endpoint.host}: {error.strerror}", remedy)
    return DeviceCheck("name", "ok", f"{endpoint.host} is {addresses[0][4][0]}")


def _port(endpoint: Endpoint) -> DeviceCheck:
    started_s = time.monotonic()
    try:
        socket.create_connection((endpoint.host, endpoint.port), WAIT_S).close()
    except OSError as error:
        reason = f"{endpoint.host}:{endpoint.port}: {error.strerror or error}"
        remedy = "is the broker up (edge-fl broker up), and no firewall in between?"
        return DeviceCheck("port", "failed", reason, remedy)
    milliseconds = 1000 * (time.monotonic() - started_s)
    return DeviceCheck("port", "ok", f"{endpoint.port} answers in {milliseconds:.0f} ms")


def _tls(endpoint: Endpoint) -> DeviceCheck:
    context = endpoint.tls_context()
    if context is None:
        remedy = "enrol the device and give it an identity"
        return DeviceCheck("TLS", "warning", "none: anyone on the network can read and write", remedy)
    try:
        with (
            socket.create_connection((endpoint.host, endpoint.port), WAIT_S) as plain,
            context.wrap_socket(plain, server_hostname=endpoint.host) as secure,
        ):
            signed = f"{secure.version()}, the broker's certificate is signed by {text(endpoint.ca or 'a CA of this system')}"
            return DeviceCheck("TLS", "ok", signed)
    except ssl.SSLCertVerificationError as error:
        remedy = "a wrong clock, another CA than the broker's, or another host name than in its certificate"
        if error.verify_code in tls.OTHER_HOST:
            remedy = f"on the broker's computer: edge-fl broker certificate --add {endpoint.host}"
        return DeviceCheck("TLS", "failed", tls.explain(error, endpoint), remedy)
    except (OSError, ssl.SSLError) as error:
        return DeviceCheck("TLS", "failed", str(error), "does the broker listen with TLS on this port?")


def _topics(config: DeviceConfig, endpoint: Endpoint) -> Iterator[DeviceCheck]:
    """Sign in as the device, subscribe to its topics, and publish harmless messages to its log and echo topics."""
    topics, received = Topics(config.broker.fleet), list[Event]()
    client_id = endpoint.client_id(config.broker.fleet, config.id)
    client = MqttTransport(endpoint, client_id, None, received.append, session_expiry_s=0, clean_start=True)
    try:
        client.wait_connected(WAIT_S)
        yield DeviceCheck("sign-in", "ok", f"as {config.id}")
        reads = {
            "own orders": topics.down(config.id, "#"),
            "server state": topics.server("state"),
            "release metadata": topics.tuf("timestamp.json"),
            "rounds": topics.round("+"),
        }
        for pattern in reads.values():
            client.subscribe(pattern)
        writes = {"own log": topics.up(config.id, "log"), "own echo": topics.down(config.id, "echo")}
        client.publish(Packet(writes["own log"], encode(Log("info", "doctor")), expiry_s=5))
        client.publish(Packet(writes["own echo"], encode(Echo("doctor")), expiry_s=5))
        client.drain(WAIT_S)
        remedy = "the broker's access list does not contain this device: same fleet? edge-fl broker config"
        for name, topic in (reads | writes).items():
            if topic in client.denied:
                yield DeviceCheck(f"topic: {name}", "failed", f"{topic}: {client.denied[topic]}", remedy)
            else:
                yield DeviceCheck(f"topic: {name}", "ok", topic)
        time.sleep(0.3)
        if any(isinstance(event, Packet) and event.topic == topics.server("state") for event in received):
            yield DeviceCheck("server", "ok", "has used this broker")
        else:
            found = f"none of fleet {config.broker.fleet!r} was ever on this broker"
            remedy = "is the fleet's name right (--fleet)? else start its server: edge-fl server up"
            yield DeviceCheck("server", "warning", found, remedy)
    except EdgeFLError as error:
        remedy = "is the device enrolled and not revoked? edge-fl fleet list"
        yield DeviceCheck("sign-in", "failed", str(error), remedy)
    finally:
        client.close()
