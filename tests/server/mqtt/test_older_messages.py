"""What tells a restored broker's messages from replayed ones, and the lines about them, on a clock that the test moves."""

import pytest

from edge_fl.failures import Failure
from edge_fl.secure.signatures import ForgedError
from edge_fl.wire.messages import Capability, DeviceState
from edge_fl.wire.topics import Address
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.statements import (
    FORGET_S,
    GATHER_S,
    PAUSE_S,
    SETTLE_S,
    OlderMessages,
    SignatureLog,
    Standing,
    Statements,
)
from edge_fl_server.registry import registered_devices
from tests.clock import Clock
from tests.devices.scripted import eventually
from tests.rejections import rejections_of

INIT, READY = DeviceState("init", "b"), DeviceState("ready", "b")
META = Capability("head", "x86_64", "3.12")
NONE: frozenset[str] = frozenset()
QUIET = Standing(NONE, NONE, NONE)


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def older(clock: Clock) -> OlderMessages:
    older = OlderMessages(clock)
    older.connected()
    return older


def test_a_device_that_connects_again_replaces_its_outdated_messages(
    older: OlderMessages, clock: Clock
) -> None:
    assert older.is_outdated("a", "state") and older.is_outdated("a", "meta")
    assert older.look() == Standing(frozenset("a"), frozenset("a"), NONE)
    older.current("a", "meta", META, newer=True)
    older.current("a", "state", INIT, newer=True)
    clock.now_s += 10 * SETTLE_S
    assert older.look() == QUIET


def test_an_older_message_after_a_current_one_is_replayed(older: OlderMessages) -> None:
    older.current("a", "state", READY, newer=False)
    assert not older.is_outdated("a", "state")
    assert older.is_outdated("a", "meta")  # of another kind
    older.connected()
    assert older.is_outdated("a", "state")


def test_a_device_that_was_connected_all_along_shows_that_its_message_was_replayed(
    older: OlderMessages, clock: Clock
) -> None:
    assert older.is_outdated("a", "state")
    older.current("a", "meta", META, newer=True)
    older.current("a", "state", READY, newer=True)
    assert older.look().waiting == frozenset("a")
    clock.now_s += SETTLE_S
    assert older.look() == Standing(NONE, NONE, frozenset("a"))
    assert older.look() == QUIET


def test_a_returned_device_whose_newer_state_is_kept_back_shows_a_replay(
    older: OlderMessages, clock: Clock
) -> None:
    assert older.is_outdated("a", "state")
    older.current("a", "meta", META, newer=True)
    clock.now_s += SETTLE_S
    assert older.look().replayed == frozenset("a")


def test_a_device_that_does_not_return_and_messages_delivered_twice_are_no_replay(
    older: OlderMessages, clock: Clock
) -> None:
    assert older.is_outdated("away", "state")
    assert older.is_outdated(
        "twice", "state"
    )  # not acknowledged before the connection broke, like the last one
    older.current("twice", "state", READY, newer=False)
    clock.now_s += 100 * SETTLE_S
    assert older.look() == Standing(frozenset({"away", "twice"}), frozenset({"away"}), NONE)


@pytest.fixture
def signatures(clock: Clock) -> SignatureLog:
    return SignatureLog(clock)


def test_many_messages_of_a_kind_are_one_line_then_silence_until_there_are_more_devices(
    signatures: SignatureLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        for number in range(50):
            signatures.reject(f"pi-{number:02d}", ForgedError("state is older than one", Failure.REPLAYED))
        signatures.reject("pi-07", ForgedError("pi-07: certificate of another CA\n", Failure.FORGED))
        signatures.advance(QUIET)
        clock.now_s += GATHER_S
    signatures.advance(QUIET)
    replayed, forged = caplog.messages
    assert "replayed messages of 50 devices (pi-00, pi-01, pi-02 and 47 more)" in replayed
    assert "distrust the broker" in replayed and "forged messages of 1 device (pi-07)" in forged
    clock.now_s += PAUSE_S
    signatures.reject("pi-07", ForgedError("again", Failure.FORGED))
    signatures.advance(QUIET)
    assert len(caplog.messages) == 2
    signatures.reject("pi-08", ForgedError("another CA", Failure.FORGED))
    signatures.advance(QUIET)
    assert "forged messages of 2 devices (pi-07, pi-08)" in caplog.messages[-1]
    clock.now_s += FORGET_S
    signatures.advance(QUIET)
    signatures.reject("pi-07", ForgedError("next week", Failure.FORGED))
    clock.now_s += GATHER_S
    signatures.advance(QUIET)
    assert "forged messages of 1 device (pi-07)" in caplog.messages[-1]


def test_devices_that_do_not_return_are_named_once(
    signatures: SignatureLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    signatures.advance(Standing(frozenset("abc"), frozenset("abc"), NONE))
    clock.now_s += GATHER_S
    for _ in range(5):
        signatures.advance(Standing(NONE, frozenset("b"), NONE))
        clock.now_s += PAUSE_S
    assert [line.split(" (")[0] for line in caplog.messages] == [
        "the broker delivers older messages of 3 devices",
        "1 device",
    ]
    signatures.advance(QUIET)
    assert "nothing is lost" in caplog.messages[-1]


@pytest.mark.parametrize(("revoked", "rejected"), [([], ["pi-07"]), (["pi-07"], [])])
def test_messages_that_a_revoked_device_has_left_at_the_broker_are_no_news(
    revoked: list[str], rejected: list[str]
) -> None:
    with Journal(fleet="main") as journal:
        registered_devices.set_revoked(journal.db, "main", revoked)
        eventually(lambda: journal.blocked("pi-07") == ("revoked" if revoked else ""))
        statements = Statements(journal)
        statements.reject(Address("state", "pi-07"), ForgedError("older", Failure.REPLAYED))
        db = journal.db
    assert [one.device for one in rejections_of(db, "main")] == rejected
