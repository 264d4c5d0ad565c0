"""The doctor's way to the broker, step by step: name, port, TLS, sign-in, and the topics that are the device's own."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator

from devices.config import DeviceConfig
from devices.doctor.check_result import Finding
from devices.doctor.device_checks import is_running
from edge_fl.errors import ConfigError, EdgeFLError
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.messages import Echo, Log, encode
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Event, Packet

WAIT_S = 10.0


def network(config: DeviceConfig) -> Iterator[Finding]:
    """From the broker's name to the device's own topics; the first failure ends it."""
    try:
        endpoint = config.broker.endpoint
    except ConfigError as error:
        yield Finding(
            "identity", "failed", str(error), "flash the device again, or enrol it: edge-fl fleet enrol"
        )
        return
    for step in (_name, _port, _tls):
        finding = step(endpoint)
        if finding:
            yield finding
        if finding and finding.state == "failed":
            return
    if is_running(config):
        why = "the agent is running and holds the connection"
        yield Finding(
            "sign-in and topics", "skipped", why, "stop it to try them: sudo systemctl stop edge-fl"
        )
        return
    yield from _topics(config, endpoint)


def _name(endpoint: Endpoint) -> Finding:
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        return Finding(
            "name",
            "failed",
            f"{endpoint.host}: {error.strerror}",
            "check the network, DNS, and broker.host in the settings",
        )
    return Finding("name", "ok", f"{endpoint.host} is {found[0][4][0]}")


def _port(endpoint: Endpoint) -> Finding:
    started_s = time.monotonic()
    try:
        socket.create_connection((endpoint.host, endpoint.port), WAIT_S).close()
    except OSError as error:
        return Finding(
            "port",
            "failed",
            f"{endpoint.host}:{endpoint.port}: {error.strerror or error}",
            "is the broker up (edge-fl broker up), and no firewall in between?",
        )
    return Finding("port", "ok", f"{endpoint.port} answers in {1000 * (time.monotonic() - started_s):.0f} ms")


def _tls(endpoint: Endpoint) -> Finding | None:
    context = endpoint.tls_context()
    if context is None:
        return Finding(
            "TLS",
            "warning",
            "none: anybody on the network reads and writes",
            "enrol the device and give it an identity",
        )
    try:
        with (
            socket.create_connection((endpoint.host, endpoint.port), WAIT_S) as plain,
            context.wrap_socket(plain, server_hostname=endpoint.host) as secure,
        ):
            return Finding(
                "TLS", "ok", f"{secure.version()}, the broker's certificate is signed by {endpoint.ca}"
            )
    except ssl.SSLCertVerificationError as error:
        return Finding(
            "TLS",
            "failed",
            error.verify_message,
            "a wrong clock, another CA than the broker's, or another host name than in its certificate",
        )
    except (OSError, ssl.SSLError) as error:
        return Finding("TLS", "failed", str(error), "does the broker listen with TLS on this port?")


def _topics(config: DeviceConfig, endpoint: Endpoint) -> Iterator[Finding]:
    """Signs in as the device, reads where it reads, and writes where writing does no harm: to its log and to itself."""
    topics, heard = Topics(config.broker.fleet), list[Event]()
    client = MqttTransport(endpoint, config.id, None, heard.append, session_expiry_s=0, clean_start=True)
    try:
        client.wait_connected(WAIT_S)
        yield Finding("sign-in", "ok", f"as {config.id}")
        reads = {
            "own orders": topics.down(config.id),
            "server state": topics.server_state(),
            "release metadata": topics.tuf("timestamp.json"),
            "rounds": topics.round("+"),
        }
        for pattern in reads.values():
            client.subscribe(pattern)
        writes = {"own log": topics.log(config.id), "own echo": topics.echo(config.id)}
        client.publish(Packet(writes["own log"], encode(Log("info", "doctor")), expiry_s=5))
        client.publish(Packet(writes["own echo"], encode(Echo("doctor")), expiry_s=5))
        client.drain(WAIT_S)
        for name, topic in (reads | writes).items():
            if topic in client.refused:
                remedy = (
                    "the broker's access list does not know this device: same fleet? edge-fl broker config"
                )
                yield Finding(f"topic: {name}", "failed", f"{topic}: {client.refused[topic]}", remedy)
            else:
                yield Finding(f"topic: {name}", "ok", topic)
        time.sleep(0.3)
        online = any(isinstance(event, Packet) and event.topic == topics.server_state() for event in heard)
        yield (
            Finding("server", "ok", "has been here")
            if online
            else Finding("server", "warning", "was never on this broker", "start it: edge-fl server run")
        )
    except EdgeFLError as error:
        yield Finding(
            "sign-in", "failed", str(error), "is the device enrolled and not revoked? edge-fl fleet list"
        )
    finally:
        client.close()
