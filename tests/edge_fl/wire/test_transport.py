"""The contract test of all transports."""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from edge_fl.errors import ProtocolError
from edge_fl.wire.transport import JSON, SAFETENSORS, Connected, Disconnected, Event, Packet, Transport
from tools.memory_broker import matches

Connect = Callable[..., Any]


def test_a_packet_arrives_as_it_was_sent(connect: Connect, topic: str) -> None:
    sender, receiver = connect(), connect()
    receiver.subscribe(topic)
    sender.transport.publish(Packet(topic, b"\x00\xff", content_type=SAFETENSORS, expiry_s=600))
    packet = receiver.heard.next(Packet)
    assert 480 <= packet.expiry_s <= 600
    assert packet == Packet(topic, b"\x00\xff", content_type=SAFETENSORS, expiry_s=packet.expiry_s)


def test_order_is_kept(connect: Connect, topic: str) -> None:
    sender, receiver = connect(), connect()
    receiver.subscribe(f"{topic}/#")
    sent = [str(number).encode() for number in range(200)]
    for number, payload in enumerate(sent):
        sender.transport.publish(Packet(f"{topic}/{number % 3}", payload))
    assert receiver.heard.payloads(200) == sent


@pytest.mark.parametrize(
    ("pattern", "heard"),
    [
        ("{}/a/b", ["a/b"]),
        ("{}/+/b", ["a/b", "x/b"]),
        ("{}/a/+", ["a/b", "a/c"]),
        ("{}/a/#", ["a", "a/b", "a/c", "a/b/c"]),
        ("{}/#", ["a", "a/b", "a/c", "a/b/c", "x/b"]),
        ("{}/+/+/c", ["a/b/c"]),
    ],
)
def test_wildcards_match_levels(connect: Connect, topic: str, pattern: str, heard: list[str]) -> None:
    client = connect()
    client.subscribe(pattern.format(topic))
    for name in ("a", "a/b", "a/c", "a/b/c", "x/b"):
        client.transport.publish(Packet(f"{topic}/{name}", b""))
    assert [client.heard.next(Packet).topic for _ in heard] == [f"{topic}/{name}" for name in heard]
    assert client.hears_nothing()
    assert all(matches(pattern.format(topic), f"{topic}/{name}") for name in heard)


def test_a_wildcard_does_not_reach_the_brokers_own_topics() -> None:
    assert not matches("#", "$SYS/broker/version")
    assert matches("$SYS/#", "$SYS/broker/version")


def test_what_is_retained_reaches_later_subscribers_and_says_so(connect: Connect, topic: str) -> None:
    sender, receiver = connect(), connect()
    sender.transport.publish(Packet(topic, b"old", retain=True))
    sender.transport.publish(Packet(topic, b"new", retain=True))
    sender.transport.drain(60)
    receiver.transport.subscribe(topic)
    first = receiver.heard.next(Packet)
    sender.transport.publish(Packet(topic, b"newer", retain=True))
    second = receiver.heard.next(Packet)
    assert (first.payload, first.retain) == (b"new", True)
    assert (second.payload, second.retain) == (b"newer", False)


def test_a_second_subscription_sends_the_retained_again(connect: Connect, topic: str) -> None:
    client = connect()
    client.transport.publish(Packet(topic, b"kept", retain=True))
    for _ in range(3):
        client.transport.subscribe(topic)
    assert client.heard.payloads(3) == [b"kept"] * 3


def test_a_subscription_lowers_the_quality_of_what_comes_and_is_not_kept_for_the_absent(
    connect: Connect, topic: str
) -> None:
    client, sender = connect("absent", session_expiry_s=60), connect()
    sender.transport.publish(Packet(f"{topic}/kept", b"kept", retain=True))
    sender.transport.drain(60)
    client.transport.subscribe(f"{topic}/#", qos=0)
    assert client.heard.next(Packet) == Packet(
        f"{topic}/kept", b"kept", retain=True, qos=0, content_type=JSON
    )
    client.transport.close()
    sender.transport.publish(Packet(f"{topic}/missed", b""))
    sender.transport.drain(60)
    again = connect("absent", session_expiry_s=60)
    assert again.present
    assert again.hears_nothing()


def test_an_empty_payload_clears_what_is_retained(connect: Connect, topic: str) -> None:
    client = connect()
    client.transport.publish(Packet(topic, b"kept", retain=True))
    client.transport.publish(Packet(topic, b"", retain=True))
    client.subscribe(topic)
    assert client.hears_nothing()


def test_after_unsubscribe_nothing_comes(connect: Connect, topic: str) -> None:
    client = connect()
    client.subscribe(topic)
    client.transport.unsubscribe(topic)
    client.subscribe()  # the broker has answered all before
    client.transport.publish(Packet(topic, b""))
    assert client.hears_nothing()


@pytest.mark.parametrize("clean", [True, False])
def test_a_will_is_published_for_a_crash_only(connect: Connect, topic: str, clean: bool) -> None:
    watcher = connect()
    watcher.subscribe(topic)
    mortal = connect(will=Packet(topic, b"lost", retain=True, content_type="text/plain"))
    mortal.transport.close(clean=clean)
    if clean:
        connect()  # the broker has taken the farewell before this greeting
        assert watcher.hears_nothing()
    else:
        assert watcher.heard.next(Packet) == Packet(topic, b"lost", content_type="text/plain")


def test_a_message_waits_for_an_absent_client(connect: Connect, topic: str) -> None:
    name, sender = f"sleeper-{secrets.token_hex(4)}", connect()
    sleeper = connect(name, session_expiry_s=60)
    assert not sleeper.present
    sleeper.subscribe(topic)
    sleeper.transport.close()
    for number in range(3):
        sender.transport.publish(Packet(topic, b"%d" % number))
    sender.transport.publish(Packet(topic, b"too late", expiry_s=1))
    sender.transport.drain(60)
    time.sleep(2.2)  # until the last one has expired, for a broker that counts whole seconds
    back = connect(name, session_expiry_s=0)
    assert back.present
    assert back.heard.payloads(3) == [b"0", b"1", b"2"]
    assert back.hears_nothing()


def test_without_expiry_a_session_ends_with_its_connection(connect: Connect, topic: str) -> None:
    name = f"passer-by-{secrets.token_hex(4)}"
    connect(name).transport.close()
    assert not connect(name).present


def test_a_clean_start_forgets_the_session(connect: Connect, topic: str) -> None:
    name = f"forgetful-{secrets.token_hex(4)}"
    client = connect(name, session_expiry_s=60)
    client.subscribe(topic)
    client.transport.publish(Packet(topic, b"missed"))
    client.transport.drain(60)
    client.transport.close()
    again = connect(name, clean_start=True)
    assert not again.present
    assert again.hears_nothing()


@pytest.mark.parametrize("size", [300_000, 10_000_000])
def test_a_large_packet_is_refused_before_it_is_sent(connect: Connect, topic: str, size: int) -> None:
    client = connect()
    client.subscribe(topic)
    with pytest.raises(
        ProtocolError, match=rf"{topic}: packet of \d+ bytes, the broker accepts 300000; nothing was sent"
    ):
        client.transport.publish(Packet(topic, bytes(size)))
    client.transport.publish(Packet(topic, bytes(256 * 1024)))
    assert len(client.heard.next(Packet).payload) == 256 * 1024


@pytest.mark.parametrize("wrong", ["", "a/+", "a/#", "#"])
def test_a_topic_with_a_wildcard_is_refused(connect: Connect, wrong: str) -> None:
    with pytest.raises(ProtocolError, match="without wildcards"):
        connect().transport.publish(Packet(wrong, b""))


@pytest.mark.parametrize("wrong", ["", "a/#/b", "a+", "a/b#", "+a/b", "##"])
def test_a_subscription_that_mqtt_does_not_know_is_refused(connect: Connect, wrong: str) -> None:
    with pytest.raises(ProtocolError, match="alone in a level"):
        connect().transport.subscribe(wrong)


def test_events_come_one_at_a_time_and_never_inside_a_call(
    make: Callable[..., Transport], connect: Connect, topic: str
) -> None:
    inside, most, count = 0, 0, 0
    calling, threads, done = threading.get_ident(), set[int](), threading.Event()

    def listen(event: Event) -> None:
        nonlocal inside, most, count
        inside += 1
        most = max(most, inside)
        threads.add(threading.get_ident())
        time.sleep(0.001)
        inside -= 1
        count += isinstance(event, Packet)
        if count == 60:
            done.set()

    listener = make("listener", None, listen, session_expiry_s=0)
    listener.wait_connected(60)
    listener.subscribe(topic)
    listener.drain(60)
    senders = [connect() for _ in range(2)]
    for _ in range(20):
        for transport in (listener, *(sender.transport for sender in senders)):
            transport.publish(Packet(topic, b""))
    assert done.wait(60)
    assert most == 1
    assert calling not in threads
    listener.close()


def test_a_listener_that_raises_is_logged_and_hears_the_next(
    make: Callable[..., Transport], topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[bytes] = []
    done = threading.Event()

    def fragile(event: Event) -> None:
        if isinstance(event, Connected):
            raise RuntimeError("not ready")
        if isinstance(event, Packet):
            heard.append(event.payload)
            if event.payload == b"poison":
                raise ValueError("cannot digest this")
            done.set()

    transport = make("fragile", None, fragile, session_expiry_s=0)
    with caplog.at_level(logging.ERROR):
        transport.wait_connected(60)
        transport.subscribe(topic)
        transport.publish(Packet(topic, b"poison"))
        transport.publish(Packet(topic, b"food"))
        assert done.wait(60)
    assert heard == [b"poison", b"food"]
    assert "6 bytes on" in caplog.text
    assert "cannot digest this" in caplog.text
    transport.close()


def test_a_listener_may_publish_and_close(make: Callable[..., Transport], topic: str) -> None:
    answered = threading.Event()

    def answer(event: Event) -> None:
        match event:
            case Connected():
                transport.subscribe(f"{topic}/question")
                transport.publish(Packet(f"{topic}/question", b"?"))
            case Packet():
                transport.publish(Packet(f"{topic}/answer", b"!", retain=True))
                transport.close()
                answered.set()

    created = threading.Event()
    transport = make("answering", None, lambda event: created.wait(60) and answer(event), session_expiry_s=0)
    created.set()
    assert answered.wait(60)


def test_after_close_calls_do_nothing_and_nothing_comes(connect: Connect, topic: str) -> None:
    client, other = connect(), connect()
    client.subscribe(topic)
    client.transport.close()
    client.transport.close(clean=False)
    client.transport.publish(Packet(topic, b""))
    client.transport.subscribe(topic)
    client.transport.unsubscribe(topic)
    other.transport.publish(Packet(topic, b""))
    other.transport.drain(60)
    assert client.heard.is_silent()


def test_a_newer_client_replaces_an_older_one_of_the_same_name(connect: Connect, topic: str) -> None:
    watcher = connect()
    watcher.subscribe(topic)
    name = f"twin-{secrets.token_hex(4)}"
    first = connect(name, will=Packet(topic, b"first is lost"))
    second = connect(name)
    first.heard.next(Disconnected)
    assert watcher.heard.payloads(1) == [b"first is lost"]
    first.transport.close()
    second.transport.close()
