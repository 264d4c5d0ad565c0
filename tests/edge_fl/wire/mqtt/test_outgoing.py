"""The queue keeps order, keeps to its window, and forgets nothing that has not been answered."""

import itertools
import threading
from types import SimpleNamespace

import pytest

from edge_fl.errors import ProtocolError
from edge_fl.wire.mqtt import outgoing as outgoings
from edge_fl.wire.mqtt.outgoing import Filter, Outgoing, Publication
from edge_fl.wire.transport import Packet

WAIT_S = 60.0  # on a busy machine; every wait ends with its event


class Wire:
    """Takes items as a connection does, and numbers them."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self._ids = itertools.count(1)

    def __call__(self, item: Publication | Filter) -> int | None:
        self.sent.append(item.pattern if isinstance(item, Filter) else item.packet.topic)
        return None if isinstance(item, Publication) and not item.packet.qos else next(self._ids)


class Changed(threading.Condition):
    """`waits` is set as soon as a thread waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.set()
        return super().wait(timeout)


@pytest.fixture
def changed() -> Changed:
    return Changed()


@pytest.fixture
def outgoing(changed: Changed) -> Outgoing:
    return Outgoing(1000, changed)


def test_a_window_bounds_what_is_under_way(outgoing: Outgoing) -> None:
    for name in "abcd":
        outgoing.publish(Packet(name, b""))
    wire = Wire()
    outgoing.send(2, wire)
    assert wire.sent == ["a", "b"]
    outgoing.acknowledged(1)
    outgoing.send(2, wire)
    assert wire.sent == ["a", "b", "c"]
    assert outgoing.drain(0) == 3


def test_subscriptions_and_publications_keep_their_order(outgoing: Outgoing) -> None:
    outgoing.publish(Packet("a", b""))
    outgoing.filter("b/#", wanted=True)
    outgoing.publish(Packet("c", b"", qos=0))
    outgoing.publish(Packet("d", b""))
    outgoing.send(1, wire := Wire())
    assert wire.sent == ["a", "b/#", "c"]


@pytest.mark.parametrize(("present", "again"), [(True, ["one", "two", "three"]), (False, ["three"])])
def test_unconfirmed_subscriptions_are_repeated_in_a_session_that_lives_on(
    outgoing: Outgoing, present: bool, again: list[str]
) -> None:
    outgoing.filter("zero", wanted=True)
    outgoing.filter("one", wanted=True)
    outgoing.filter("two", wanted=False)
    outgoing.send(1, Wire())
    outgoing.acknowledged(1)
    outgoing.filter("three", wanted=True)  # asked for while there was no connection
    outgoing.resume(session_present=present)
    outgoing.send(1, wire := Wire())
    assert wire.sent == again


def test_what_is_under_way_stays_so_across_connections(outgoing: Outgoing) -> None:
    outgoing.publish(Packet("a", b""))
    outgoing.send(1, wire := Wire())
    outgoing.resume(session_present=False)
    outgoing.send(1, wire)
    assert wire.sent == ["a"], "the connection repeats it, not the queue"
    assert outgoing.drain(0) == 1
    assert outgoing.acknowledged(1)
    assert outgoing.drain(0) == 0
    assert outgoing.acknowledged(1) is None


def test_drain_waits_for_what_was_there_and_for_no_more(outgoing: Outgoing, changed: Changed) -> None:
    outgoing.publish(Packet("a", b""))
    left: list[int] = []
    drained = threading.Thread(target=lambda: left.append(outgoing.drain(WAIT_S)))
    drained.start()
    assert changed.waits.wait(WAIT_S)
    outgoing.publish(Packet("b", b""))
    outgoing.send(1, Wire())
    outgoing.acknowledged(1)
    drained.join(WAIT_S)
    assert left == [0]
    assert outgoing.drain(0) == 1


def test_drain_waits_for_the_confirmation_of_a_subscription(outgoing: Outgoing, changed: Changed) -> None:
    outgoing.filter("b/#", wanted=True)
    outgoing.send(1, Wire())
    drained = threading.Thread(target=lambda: outgoing.drain(WAIT_S))
    drained.start()
    assert changed.waits.wait(WAIT_S) and drained.is_alive()
    outgoing.acknowledged(1)
    drained.join(WAIT_S)
    assert not drained.is_alive()


def test_drain_waits_for_nothing_when_it_is_over(outgoing: Outgoing, changed: Changed) -> None:
    outgoing.publish(Packet("a", b""))
    assert outgoing.drain(WAIT_S, lambda: True) == 1
    assert not changed.waits.is_set()


def test_bytes_are_given_back_when_they_leave(outgoing: Outgoing) -> None:
    for _ in range(3):
        outgoing.publish(Packet("a", bytes(1000)))
        with pytest.raises(ProtocolError, match="1000 bytes are already queued"):
            outgoing.publish(Packet("a", bytes(1)))
        outgoing.send(1, wire := Wire())
        outgoing.acknowledged(1)
        outgoing.publish(Packet("b", bytes(1000), qos=0))
        outgoing.send(1, wire)


def test_an_expiry_counts_down_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(outgoings, "time", SimpleNamespace(monotonic=lambda: now))
    assert Publication(1, Packet("a", b"", expiry_s=60), now + 9.5).remaining() == Packet(
        "a", b"", expiry_s=10
    )
    assert Publication(1, Packet("a", b"", expiry_s=60), now - 0.1).remaining() is None
