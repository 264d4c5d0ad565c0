"""What MQTT adds to the contract: a broker that dies, many clients on one thread, refusals, a broker that lies."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.config import Limits as BrokerLimits
from broker.config import Settings
from broker.find import Program
from broker.mosquitto import Mosquitto, free_port
from edge_fl.errors import ConfigError, ConnectError, DeadlineError, ProtocolError
from edge_fl.wire.loop import MqttLoop
from edge_fl.wire.mqtt import Endpoint, MqttTransport
from edge_fl.wire.transport import OCTETS, Connected, Disconnected, Limits, Packet

FAST = Limits(max_retry_s=0.2, connect_timeout_s=1.0)
MakeRecorder = Callable[[], Any]
Issue = Callable[[str], tuple[Path, Path, Path]]


@pytest.fixture
def broker(tmp_path: Path, mosquitto_program: Program) -> Iterator[Mosquitto]:
    """A broker of the test's own, to be killed."""
    with Mosquitto(Settings(tmp_path, port=0), mosquitto_program) as own:
        yield own


@contextlib.contextmanager
def broker_that(answers: Callable[[socket.socket], object]) -> Iterator[Endpoint]:
    """A server on loopback that treats every connection in its own way, then closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    answers(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield Endpoint("127.0.0.1", listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


@pytest.mark.broker
def test_what_is_published_while_the_broker_is_dead_arrives_in_order(
    broker: Mosquitto, recorder: MakeRecorder
) -> None:
    heard = recorder()
    sender = MqttTransport(broker.endpoint, "sender", None, heard, limits=FAST)
    heard.next(Connected)
    broker.kill()
    assert not heard.next(Disconnected).final
    for number in range(50):  # more than the window
        sender.publish(Packet(f"kept/{number}", b"%d" % number, retain=True))
        sender.publish(Packet("last", b"%d" % number, retain=True))
    with pytest.raises(DeadlineError, match=r"100 publications not taken in 0\.1 s; they stay queued"):
        sender.drain(0.1)
    broker.start()
    heard.next(Connected)
    sender.drain(10)
    reader = MqttTransport(broker.endpoint, "reader", None, again := recorder(), limits=FAST)
    reader.subscribe("kept/+")
    assert sorted(map(int, again.payloads(50))) == list(range(50))
    reader.subscribe("last")
    assert again.payloads(1) == [b"49"]
    sender.close()
    reader.close()


@pytest.mark.broker
def test_after_a_restart_the_owner_is_told_to_subscribe_again_or_is_still_subscribed(
    broker: Mosquitto, recorder: MakeRecorder
) -> None:
    heard = recorder()
    client = MqttTransport(broker.endpoint, "client", None, heard, limits=FAST)
    for _ in range(3):
        if not heard.next(Connected).session_present:
            client.subscribe("a/#")
        client.publish(Packet("a/b", b"!"))
        assert heard.payloads(1) == [b"!"]
        broker.kill()
        broker.start()
    client.close()


@pytest.mark.broker
def test_a_subscription_asked_for_offline_is_made_when_the_broker_comes(
    tmp_path: Path, mosquitto_program: Program, recorder: MakeRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port("127.0.0.1")
    heard = recorder()
    client = MqttTransport(Endpoint(port=port), "early", None, heard, limits=FAST)
    client.subscribe("a/#")
    client.publish(Packet("a/b", b"patience"))
    client.publish(Packet("a/b", b"forgotten", qos=0))
    client.publish(Packet("a/b", b"too late", expiry_s=1))
    with pytest.raises(
        ConnectError, match=r"mqtt://127\.0\.0\.1:\d+: Connection refused .* 'edge-fl broker up'"
    ):
        client.wait_connected(1.0)
    with Mosquitto(Settings(tmp_path, port=port), mosquitto_program):
        client.wait_connected(10)
        assert heard.payloads(1) == [b"patience"]
        assert heard.is_silent()
        client.close()
    assert caplog.text.count("trying again") == 1, "an absent broker is mentioned once, not at every attempt"


@pytest.mark.broker
@pytest.mark.parametrize("count", [300])
def test_one_loop_carries_hundreds_of_clients(mosquitto: Mosquitto, count: int) -> None:
    loop, heard = MqttLoop(), queue.SimpleQueue[str]()
    begin = time.perf_counter()
    clients = [
        MqttTransport(
            mosquitto.endpoint,
            f"many-{number}",
            None,
            lambda event, number=number: (
                heard.put(f"{number} {event.payload!r}") if isinstance(event, Packet) else None
            ),
            loop=loop,
            session_expiry_s=0,
        )
        for number in range(count)
    ]
    for client in clients:
        client.wait_connected(30)
        client.subscribe("many/all")
    connected = time.perf_counter() - begin
    for client in clients:
        client.subscribe(f"many/{client.client_id}")
        client.publish(Packet(f"many/{client.client_id}", b"own"))
    answers = {heard.get(timeout=10) for _ in clients}
    clients[0].publish(Packet("many/all", b"all"))
    answers |= {heard.get(timeout=10) for _ in clients}
    assert answers == {f"{number} {what!r}" for number in range(count) for what in (b"own", b"all")}
    threads = [thread for thread in threading.enumerate() if thread.name == "edge-fl-connect"]
    assert not threads
    for client in clients:
        client.close()
    loop.close()
    print(f"{count} clients online in {connected:.2f} s")  # noqa: T201  # a figure, never asserted


@pytest.mark.broker
def test_a_slow_connection_hinders_no_other(mosquitto: Mosquitto, recorder: MakeRecorder) -> None:
    loop, release = MqttLoop(handshakes=2), threading.Event()
    with broker_that(lambda connection: release.wait(10)) as silent:
        stuck = MqttTransport(silent, "stuck", None, recorder(), loop=loop, limits=FAST)
        good = [
            MqttTransport(
                mosquitto.endpoint, f"good-{number}", None, recorder(), loop=loop, session_expiry_s=0
            )
            for number in range(5)
        ]
        for client in good:
            client.wait_connected(5)
        with pytest.raises(ConnectError, match="the broker does not answer"):
            stuck.wait_connected(1.5)
        for client in (stuck, *good):
            client.close()
        release.set()
    loop.close()


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
        assert event.reason.startswith("refused: ")
        with pytest.raises(ConnectError, match=r"refused: .*lets 'stranger' in"):
            client.wait_connected(5)
        time.sleep(0.5)  # three times the longest pause
        assert len(attempts) == 1
        client.close()


def test_a_busy_broker_is_asked_again(recorder: MakeRecorder) -> None:
    attempts = []

    def refuse(connection: socket.socket) -> None:
        attempts.append(connection.recv(1000))
        connection.sendall(bytes([0x20, 3, 0, 0x89, 0]))

    with broker_that(refuse) as endpoint:
        client = MqttTransport(endpoint, "patient", None, recorder(), limits=FAST)
        with pytest.raises(ConnectError, match="refused: Server busy"):
            client.wait_connected(1.5)
        assert len(attempts) >= 3
        client.close()


CONNACK = bytes([0x20, 3, 0, 0, 0])


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
        assert twice.wait(10)
        client.close()
    done = threading.Event()
    loop.call(done.set)
    assert done.wait(5), "the loop's thread is dead"
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


@pytest.mark.broker
def test_the_brokers_packet_size_is_respected(
    tmp_path: Path, recorder: MakeRecorder, mosquitto_program: Program
) -> None:
    small = 2000
    port = free_port("127.0.0.1")
    client = MqttTransport(Endpoint(port=port), "sender", None, heard := recorder(), limits=FAST)
    client.publish(Packet("a", bytes(small)))  # queued while nobody knows better; dropped later, and said so
    client.publish(Packet("a", b"small", retain=True))
    with Mosquitto(
        Settings(tmp_path, port=port, limits=BrokerLimits(max_packet_bytes=small)), mosquitto_program
    ):
        heard.next(Connected)
        client.drain(5)
        assert client.broker_limits and client.broker_limits.max_packet_bytes == small
        with pytest.raises(ProtocolError, match="the broker takes 2000"):
            client.publish(Packet("a", bytes(small)))
        client.close()


def test_the_brokers_receive_maximum_is_the_window(recorder: MakeRecorder) -> None:
    received, seen = bytearray(), threading.Event()

    def never_acknowledge(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(bytes([0x20, 6, 0, 0, 3, 0x21, 0, 3]))  # CONNACK, receive maximum 3
        connection.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            while data := connection.recv(1000):
                received.extend(data)
        seen.set()

    with broker_that(never_acknowledge) as endpoint:
        client = MqttTransport(endpoint, "eager", None, heard := recorder(), limits=FAST)
        heard.next(Connected)
        for _ in range(10):
            client.publish(Packet("topic", b"payload"))
        assert seen.wait(5)
        client.close()
    assert received.count(b"payload") == 3


def test_a_queue_has_an_end(recorder: MakeRecorder) -> None:
    limits = Limits(max_queued_bytes=1000, max_retry_s=0.2)
    client = MqttTransport(Endpoint(port=free_port("127.0.0.1")), "sender", None, recorder(), limits=limits)
    client.publish(Packet("a", bytes(999)))
    with pytest.raises(ProtocolError, match="999 bytes already wait for the broker, at most 1000"):
        client.publish(Packet("a", bytes(2)))
    client.close()


@pytest.mark.broker
def test_a_silent_network_is_noticed_by_keep_alive(mosquitto: Mosquitto, recorder: MakeRecorder) -> None:
    """A relay that stops forwarding, as a router does that lost its table: no error ever comes."""
    forwarding = threading.Event()
    forwarding.set()

    def relay(client: socket.socket) -> None:
        endpoint = mosquitto.endpoint
        with socket.create_connection((endpoint.host, endpoint.port)) as server:
            pairs = ((client, server), (server, client))
            pumps = [threading.Thread(target=pump, args=pair, daemon=True) for pair in pairs]
            for each in pumps:
                each.start()
            pumps[0].join(20)  # until the client gives up: the broker's farewell is swallowed too

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if forwarding.is_set():
                    sink.sendall(data)
            if forwarding.is_set():
                sink.shutdown(socket.SHUT_RDWR)

    with broker_that(relay) as endpoint:
        client = MqttTransport(
            endpoint, "mute", None, heard := recorder(), keepalive_s=1, session_expiry_s=0, limits=FAST
        )
        heard.next(Connected)
        forwarding.clear()
        heard.next(Disconnected)
        forwarding.set()
        heard.next(Connected)
        client.close()


def test_the_pause_grows_to_a_bound_and_is_jittered(recorder: MakeRecorder) -> None:
    begun: list[float] = []

    def hang_up(connection: socket.socket) -> None:
        begun.append(time.monotonic())

    with broker_that(hang_up) as endpoint:
        client = MqttTransport(
            endpoint, "retrying", None, recorder(), limits=Limits(min_retry_s=0.01, max_retry_s=0.05)
        )
        time.sleep(1.0)
        client.close()
    pauses = [after - before for before, after in itertools.pairwise(begun)]
    assert 10 <= len(pauses) <= 100, "about 25 ms on average, never in a tight circle"
    assert max(pauses) < 0.5


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        (Endpoint(host=""), "expected a host and a port"),
        (Endpoint(port=0), "expected a host and a port"),
        (Endpoint(ca=Path("/nowhere/ca.pem")), r"/nowhere/ca\.pem: .*No such file"),
    ],
)
def test_an_endpoint_that_cannot_be_one_is_bad_input(
    endpoint: Endpoint, message: str, recorder: MakeRecorder
) -> None:
    with pytest.raises(ConfigError, match=message):
        MqttTransport(endpoint, "client", None, recorder())


@pytest.mark.broker
def test_round_trip_and_chunk_fetch_are_printed(mosquitto: Mosquitto, recorder: MakeRecorder) -> None:
    """Not asserted: the machine is shared. Run with -s to see."""
    client = MqttTransport(mosquitto.endpoint, "timing", None, heard := recorder(), session_expiry_s=0)
    heard.next(Connected)
    client.subscribe("timing/echo")
    times_ms = []
    for _ in range(200):
        begin = time.perf_counter()
        client.publish(Packet("timing/echo", b"{}"))
        heard.next(Packet)
        times_ms.append((time.perf_counter() - begin) * 1000)
    chunk, count = bytes(64 * 1024), 64
    for number in range(count):
        client.publish(Packet(f"timing/{number // 16}/{number}", chunk, retain=True, content_type=OCTETS))
    client.drain(10)
    begin = time.perf_counter()
    for group in range(count // 16):
        client.subscribe(f"timing/{group}/+")
        assert all(len(payload) == len(chunk) for payload in heard.payloads(16))
        client.unsubscribe(f"timing/{group}/+")
    seconds = time.perf_counter() - begin
    for number in range(count):
        client.publish(Packet(f"timing/{number // 16}/{number}", b"", retain=True))
    client.close()
    figures = (
        f"round trip p50 {sorted(times_ms)[100]:.2f} ms; fetch {count * len(chunk) / seconds / 1e6:.0f} MB/s"
    )
    print(figures)  # noqa: T201  # figures, never asserted
