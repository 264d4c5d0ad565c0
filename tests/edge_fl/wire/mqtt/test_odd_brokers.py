"""Brokers that reject, are busy, send invalid packets or close connections: retried unless final."""

import random
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_fl.errors import ConnectError
from edge_fl.wire.mqtt import transport
from edge_fl.wire.mqtt.loop import MqttLoop
from edge_fl.wire.mqtt.transport import Endpoint, MqttTransport
from edge_fl.wire.transport import Disconnected, Packet, TransportLimits
from tests.edge_fl.wire.brokers import FAST, broker_that, refused

MakeRecorder = Callable[[], Any]
Issue = Callable[[str], tuple[Path, Path, Path]]


@pytest.mark.parametrize("reason", [0x87, 0x86, 0x8A])
def test_a_refusal_is_final(recorder: MakeRecorder, reason: int) -> None:
    attempts = []

    def refuse(connection: socket.socket) -> None:
        attempts.append(connection.recv(1000))
        connection.sendall(bytes([0x20, 3, 0, reason, 0]))

    with broker_that(refuse) as endpoint:
        client = MqttTransport(endpoint, "stranger", None, heard := recorder(), limits=FAST)
        event = heard.next(Disconnected)
        assert event.final
        assert event.reason.startswith("rejected: ")
        with pytest.raises(ConnectError, match=r"does not accept 'stranger': rejected: "):
            client.wait_connected(60)
        assert client._timer is None, "no attempt is planned"
        assert len(attempts) == 1
        client.close()


def test_a_busy_broker_is_retried(recorder: MakeRecorder) -> None:
    attempts, thrice = [], threading.Event()

    def refuse(connection: socket.socket) -> None:
        attempts.append(connection.recv(1000))
        connection.sendall(bytes([0x20, 3, 0, 0x89, 0]))
        if len(attempts) == 3:
            thrice.set()

    with broker_that(refuse) as endpoint:
        client = MqttTransport(endpoint, "patient", None, recorder(), limits=FAST)
        refused(client, "rejected: Server busy")
        assert thrice.wait(60)
        client.close()


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (0x8B, "the broker shuts down (planned)"),
        (0x9D, "the broker has moved (planned)"),
        (0x8E, "another connection of this name took over"),
        (0x8D, "Keep alive timeout"),
    ],
)
def test_a_connection_that_the_broker_ends_says_why_and_whether_that_was_planned(
    recorder: MakeRecorder, reason: int, words: str
) -> None:
    def end(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(CONNACK + bytes([0xE0, 2, reason, 0]))
        connection.recv(1000)

    with broker_that(end) as endpoint:
        client = MqttTransport(endpoint, "client", None, heard := recorder(), limits=FAST)
        event = heard.next(Disconnected)
        assert (str(event), event.planned, event.final) == (words, "planned" in words, False)
        client.close()


CONNACK, PINGREQ = bytes([0x20, 3, 0, 0, 0]), bytes([0xC0, 0])


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\n\r\n", id="http"),
        pytest.param(b"\x20\x03\x00\x00\xff", id="properties cut off"),
        pytest.param(CONNACK + b"\x30\x05\x00\x09abc", id="topic longer than the packet"),
        pytest.param(CONNACK + b"\x30\x06\x00\x01a\x02\x7f\x00", id="unknown property"),
        pytest.param(CONNACK + b"\x30\x05\x00\x02\xff\xff\x00", id="topic that is no text"),
        pytest.param(CONNACK + b"\x90\x03\x00\x01\x00", id="an answer nobody asked for"),
        pytest.param(CONNACK + b"\x40\x02\xff\xff", id="an acknowledgement of nothing"),
        pytest.param(CONNACK + b"\x30\xff\xff\xff\xff\x01", id="endless length"),
    ],
)
def test_a_broker_that_talks_nonsense_is_left_and_tried_again(
    recorder: MakeRecorder, lie: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    loop, attempts, twice = MqttLoop(), [], threading.Event()

    def talk(connection: socket.socket) -> None:
        attempts.append(connection.recv(1000))
        connection.sendall(lie)
        if len(attempts) >= 3:
            twice.set()

    with broker_that(talk) as endpoint:
        client = MqttTransport(endpoint, "listener", None, recorder(), loop=loop, limits=FAST)
        assert twice.wait(60)
        client.close()
    done = threading.Event()
    loop.call(done.set)
    assert done.wait(60), "the loop's thread is dead"
    loop.close()


def test_packets_that_share_a_tls_record_all_arrive(recorder: MakeRecorder, issue: Issue) -> None:
    """What TLS has decrypted already makes no socket readable again."""
    ca, cert, key = issue("broker")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    over = threading.Event()

    def talk(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            secured.recv(1000)
            secured.sendall(CONNACK + b"".join(b"\x30\x05\x00\x01a\x00%d" % number for number in range(5)))
            over.wait(30)  # longer than anybody listens

    with broker_that(talk) as plain:
        client = MqttTransport(
            Endpoint(plain.host, plain.port, ca), "client", None, heard := recorder(), limits=FAST
        )
        assert heard.payloads(5) == [b"0", b"1", b"2", b"3", b"4"]
        client.close()
        over.set()


def test_the_brokers_receive_maximum_is_the_window(recorder: MakeRecorder) -> None:
    received, seen = bytearray(), threading.Event()

    def never_acknowledge(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(bytes([0x20, 6, 0, 0, 3, 0x21, 0, 3]))  # CONNACK, receive maximum 3
        while PINGREQ not in received and (data := connection.recv(1000)):
            received.extend(data)
        seen.set()

    with broker_that(never_acknowledge) as endpoint:
        # its ping comes after everything that it could send before
        client = MqttTransport(endpoint, "eager", None, recorder(), keepalive_s=1, limits=FAST)
        for _ in range(10):
            client.publish(Packet("topic", b"payload"))
        assert seen.wait(60)
        client.close()
    assert PINGREQ in received and received.count(b"payload") == 3


class Draws:
    """The pauses drawn by the clients of one loop, with their bounds. Clients of other tests in this process draw, too."""

    def __init__(self, loop: MqttLoop) -> None:
        self._loop = loop
        self.bounds: list[tuple[float, float]] = []
        self.pauses: list[float] = []
        self._random = random.Random(1)

    def uniform(self, low: float, high: float) -> float:
        if threading.current_thread() is not self._loop._thread:
            return random.uniform(low, high)
        self.bounds.append((low, high))
        self.pauses.append(self._random.uniform(low, high))
        return self.pauses[-1]


def test_the_pause_grows_to_a_bound_and_is_jittered(
    recorder: MakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[float] = []
    often, loop = threading.Event(), MqttLoop()
    monkeypatch.setattr(transport, "JITTER", draws := Draws(loop))

    def hang_up(connection: socket.socket) -> None:
        begun.append(time.monotonic())
        if len(begun) == 10:
            often.set()

    limits = TransportLimits(min_retry_s=0.01, max_retry_s=0.05)
    started_s = time.monotonic()
    with broker_that(hang_up) as endpoint:
        client = MqttTransport(endpoint, "retrying", None, recorder(), loop=loop, limits=limits)
        assert often.wait(60)
        client.close()
    loop.close()
    assert draws.bounds[:9] == [(0, 0.02), (0, 0.04), *[(0, 0.05)] * 7]
    assert begun[9] - started_s >= sum(draws.pauses[:9]), "every pause is kept"
