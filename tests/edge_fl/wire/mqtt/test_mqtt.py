"""What MQTT adds to the contract: a broker that dies, many clients on one thread, limits, and a network that goes silent."""

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_fl.errors import ConfigError, DeadlineError, ProtocolError
from edge_fl.wire.mqtt.loop import MqttLoop
from edge_fl.wire.mqtt.transport import Endpoint, MqttTransport
from edge_fl.wire.transport import UNTYPED, Connected, Disconnected, Packet, TransportLimits
from edge_fl_broker.config import BrokerSettings, MosquittoLimits
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from tests.edge_fl.wire.brokers import FAST, broker_that, held_port, refused

MakeRecorder = Callable[[], Any]


@pytest.fixture
def broker(tmp_path: Path, mosquitto_program: Program) -> Iterator[Mosquitto]:
    """A broker of the test's own, to be killed."""
    with Mosquitto(BrokerSettings(tmp_path, port=0), mosquitto_program) as own:
        yield own


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
    with pytest.raises(
        DeadlineError, match=r"100 publications not acknowledged within 0\.1 s; they stay queued"
    ):
        sender.drain(0.1)
    broker.start()
    heard.next(Connected)
    sender.drain(60)
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
def test_an_offline_subscription_is_made_when_the_broker_is_up(
    tmp_path: Path, mosquitto_program: Program, recorder: MakeRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    with held_port() as port:
        heard = recorder()
        client = MqttTransport(Endpoint(port=port), "early", None, heard, limits=FAST)
        client.subscribe("a/#")
        client.publish(Packet("a/b", b"patience"))
        client.publish(Packet("a/b", b"forgotten", qos=0))
        client.publish(Packet("a/b", b"too late", expiry_s=1))
        refused(client, r"mqtt://127\.0\.0\.1:\d+ accepts 'early': Connection refused .* 'edge-fl broker up'")
        time.sleep(1.0)  # then the last one has expired
        with Mosquitto(BrokerSettings(tmp_path, port=port), mosquitto_program):
            client.wait_connected(60)
            client.publish(Packet("a/b", b"the end"))
            assert heard.payloads(2) == [b"patience", b"the end"]
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
        client.wait_connected(60)
        client.subscribe("many/all")
    connected = time.perf_counter() - begin
    for client in clients:
        client.subscribe(f"many/{client.client_id}")
        client.publish(Packet(f"many/{client.client_id}", b"own"))
    answers = {heard.get(timeout=60) for _ in clients}
    clients[0].publish(Packet("many/all", b"all"))
    answers |= {heard.get(timeout=60) for _ in clients}
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
    impatient = replace(FAST, connect_timeout_s=0.5)
    with broker_that(lambda connection: release.wait(60)) as silent:
        stuck = MqttTransport(silent, "stuck", None, recorder(), loop=loop, limits=impatient)
        good = [
            MqttTransport(
                mosquitto.endpoint, f"good-{number}", None, recorder(), loop=loop, session_expiry_s=0
            )
            for number in range(5)
        ]
        for client in good:
            client.wait_connected(60)
        refused(stuck, "the broker does not answer")
        for client in (stuck, *good):
            client.close()
        release.set()
    loop.close()


@pytest.mark.broker
def test_the_brokers_packet_size_is_respected(
    tmp_path: Path, recorder: MakeRecorder, mosquitto_program: Program
) -> None:
    small = 2000
    with held_port() as port:
        client = MqttTransport(Endpoint(port=port), "sender", None, heard := recorder(), limits=FAST)
        # queued while nobody knows better; dropped later, and said so
        client.publish(Packet("a", bytes(small)))
        client.publish(Packet("a", b"small", retain=True))
        settings = BrokerSettings(tmp_path, port=port, limits=MosquittoLimits(max_packet_bytes=small))
        with Mosquitto(settings, mosquitto_program):
            heard.next(Connected)
            client.drain(60)
            assert client.broker_limits and client.broker_limits.max_packet_bytes == small
            with pytest.raises(ProtocolError, match="the broker accepts 2000"):
                client.publish(Packet("a", bytes(small)))
            client.close()


def test_a_queue_has_an_end(recorder: MakeRecorder) -> None:
    limits = TransportLimits(max_queued_bytes=1000, max_retry_s=0.2)
    with held_port() as port:
        client = MqttTransport(Endpoint(port=port), "sender", None, recorder(), limits=limits)
        client.publish(Packet("a", bytes(999)))
        with pytest.raises(ProtocolError, match="999 bytes are already queued for the broker, at most 1000"):
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
        client.publish(Packet(f"timing/{number // 16}/{number}", chunk, retain=True, content_type=UNTYPED))
    client.drain(60)
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
