"""The server's connection and roster: present devices, a single server per fleet, robustness against messages of devices."""

import threading
import time
from contextlib import contextmanager

import pytest

from edge_fl.errors import ConnectError, DeadlineError
from edge_fl.failures import Failure
from edge_fl.wire.messages import (
    Assignment,
    Capability,
    Command,
    DeviceState,
    Log,
    ServerState,
    decode,
    encode,
)
from edge_fl.wire.transport import Packet
from edge_fl_server.mqtt import connector
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.devices.assignments import Assignments, clear_leftover_assignments
from edge_fl_server.mqtt.devices.roster import Roster, RosterDevice, fold
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import connected
from edge_fl_server.registry import Database, registered_devices, registered_tags
from edge_fl_server.registry.tables import DeviceRecord
from edge_fl_server.selectors import Selection
from tests.server.conftest import QUICK, WAIT_S

FULL, HEAD = (Capability(tier, "test", "3", samples=5) for tier in ("full", "head"))


def folded(*messages, before=None):
    device = before or RosterDevice("d1")
    for message in messages:
        device = fold(device, "meta" if isinstance(message, Capability) else "state", message, 1.0)
    return device


def test_a_device_is_ready_once_its_capability_and_its_state_say_so():
    assert not folded(FULL).ready
    assert not folded(DeviceState("ready", "b1")).ready
    assert not folded(FULL, DeviceState("init", "b1")).ready
    assert folded(FULL, DeviceState("ready", "b1")).ready
    assert folded(DeviceState("alert", "b1", why="deadline"), FULL).ready


def test_a_lost_device_is_gone_and_a_late_will_of_an_older_boot_is_ignored():
    there = folded(FULL, DeviceState("ready", "b2"))
    assert folded(DeviceState("lost", "b1"), before=there) is there
    assert folded(DeviceState("lost", "b2"), before=there).gone


def test_a_device_of_another_protocol_is_never_ready():
    assert not folded(Capability("full", "test", "3", protocol="2.0"), DeviceState("ready", "b1")).ready


def test_an_empty_retained_state_retires_a_device(bench):
    device = bench.device("d1")
    bench.wait_for(full=1)
    device.send(bench.topics.up("d1", "state"), b"", retain=True)
    assert bench.eventually(lambda: not bench.roster.table)


def test_devices_are_listed_by_tier_without_lost_ones(bench):
    bench.device("d2"), bench.device("d1"), bench.device("h1", tier="head")
    bench.wait_for(full=2, heads=1)
    assert bench.roster.full_devices() == ["d1", "d2"]
    assert bench.roster.head_devices() == ["h1"]
    bench.devices[0].crash()
    assert bench.eventually(lambda: bench.roster.full_devices() == ["d1"])
    assert bench.roster.gone_for("d1") == 0 < bench.roster.gone_for("d2")


def test_only_selected_devices_train(bench):
    bench.device("d2"), bench.device("d1")
    bench.wait_for(full=2)
    journal = bench.inbox.journal
    registered_devices.record(journal.db, [DeviceRecord("main", id) for id in ("d1", "d2")])
    registered_tags.change(journal.db, "main", ["d2"], {"site": "berlin"})
    bench.roster.train_only(Selection(journal.db, "main", "site=berlin"))
    assert bench.roster.full_devices() == list(bench.fleet(bench.spec("fedavg")).ids()) == ["d2"]
    with pytest.raises(DeadlineError, match=r"1 full and 0 head-only devices \(full ones of 'site=berlin'\)"):
        bench.roster.wait_for(full=2, deadline_s=0.05)


def test_a_deadline_error_names_the_known_devices(bench):
    bench.device("h1", tier="head")
    bench.wait_for(heads=1)
    with pytest.raises(
        DeadlineError,
        match=r"0 full and 1 head-only devices after 0.1 s, expected 1 and 0; known: h1 \(head, ready\)",
    ):
        bench.roster.wait_for(full=1, deadline_s=0.1)


def test_a_deadline_error_names_devices_that_are_online_and_do_not_count_first(bench):
    for id in ("d1", "d2", "d3"):
        bench.device(id)
    bench.wait_for(full=3)
    bench.inbox.journal.quarantine("d3", "3 reports rejected")
    expected = r"2 full and .* known: d3 \(full, ready, quarantined\), d1 \(full, ready\), d2 \(full, ready\)"
    with pytest.raises(DeadlineError, match=expected):
        bench.roster.wait_for(full=3, deadline_s=0.05)


def test_devices_that_connected_before_the_server_get_a_rebirth_command(bench):
    early = bench.device("d1")
    bench.wait_for(full=1)
    second = ServerConnection(
        bench.connect, Journal(), takeover=True, limits=connector.LeaseLimits(settle_s=0.05)
    )
    received = []
    early._take = lambda packet: received.append(packet)
    roster = Roster(second)
    second.open()
    roster.wait_for(full=1, deadline_s=WAIT_S)
    command = bench.topics.down("d1", "cmd")
    assert bench.eventually(
        lambda: [decode(p.payload, Command).do for p in received if p.topic == command] == ["rebirth"]
    )
    assert not [packet for packet in received if packet.topic == command and packet.retain]
    second.close()


def test_a_second_server_does_not_start_and_the_first_one_continues(bench):
    second = ServerConnection(bench.connect, Journal(), limits=connector.LeaseLimits(settle_s=0.05))
    with pytest.raises(
        ConnectError, match=f"another server .boot {bench.connection.boot}, epoch 1. is online"
    ) as error:
        second.open()
    assert error.value.exit_code == 2
    bench.connection.check()
    assert decode(bench.retained()["srv/state"], ServerState).boot == bench.connection.boot


def test_takeover_ends_the_first_server_with_an_error(bench):
    second = ServerConnection(
        bench.connect, Journal(), takeover=True, limits=connector.LeaseLimits(settle_s=0.05)
    )
    second.open()
    assert second.epoch == bench.connection.epoch + 1
    assert bench.eventually(lambda: bench.connection.lost)
    with pytest.raises(ConnectError, match=r"another (client|server)"):
        bench.connection.check()
    assert decode(bench.retained()["srv/state"], ServerState).boot == second.boot
    second.close()


def test_a_state_that_arrives_after_connecting_raises_the_epoch(stage):
    early = stage.connect("early", None, lambda event: None)
    connection = ServerConnection(stage.connect, Journal(), limits=connector.LeaseLimits(settle_s=0.05))
    connection.open()
    old = ServerState(False, "old", 7)
    early.publish(Packet(stage.topics.server("state"), encode(old), retain=True))
    assert stage.eventually(lambda: decode(stage.retained()["srv/state"], ServerState).epoch == 8)
    connection.check()
    connection.close()
    early.close()


@pytest.mark.broker
def test_takeover_on_a_real_broker_ends_without_repeated_reconnects(real_bench):
    second = ServerConnection(
        real_bench.connect, Journal(), takeover=True, limits=connector.LeaseLimits(settle_s=0.05)
    )
    second.open()

    def is_over():
        try:
            real_bench.connection.check()
        except ConnectError as error:
            return "took over" in str(error)
        return False

    assert real_bench.eventually(is_over)
    real_bench.device("d1")
    assert real_bench.eventually(
        lambda: decode(real_bench.retained()["srv/state"], ServerState).boot == second.boot
    )
    second.check()
    second.close()


def test_the_state_is_offline_after_close_and_after_a_crash(bench):
    def online():
        return decode(bench.retained()["srv/state"], ServerState).online

    assert online()
    bench.connection.transport.close(clean=False)
    assert bench.eventually(lambda: not online())
    second = ServerConnection(bench.connect, Journal(), limits=connector.LeaseLimits(settle_s=0.05))
    second.open()
    assert online()
    second.close()
    assert not online()


def test_after_a_dropped_connection_the_server_is_online_again(bench, broker):
    broker.drop("server-main")
    assert bench.eventually(lambda: decode(bench.retained()["srv/state"], ServerState).online)
    bench.device("d1")
    bench.wait_for(full=1)


def test_a_handler_that_fails_does_not_stop_the_next_message(bench):
    def fail(heard):
        raise RuntimeError("a bug")

    bench.connection.on("state", fail)
    bench.device("d1"), bench.device("d2")
    bench.wait_for(full=2)


def test_a_newer_server_numbers_assignments_higher_and_clears_leftovers(bench):
    bench.assignments.assign("d1", "train", run_id="t1", round=3, id="t1-3")
    bench.assignments.assign("h1", "serve", release=2, id="rel-2")
    left = decode(bench.retained()["d/d1/dn/assignment"], Assignment)
    bench.connection.transport.close(clean=False)
    second = ServerConnection(
        bench.connect, Journal(), takeover=True, limits=connector.LeaseLimits(settle_s=0.05)
    )
    assignments = Assignments(second)
    second.open()
    assert clear_leftover_assignments(second) == 1
    assert "d/d1/dn/assignment" not in bench.retained()
    assert decode(bench.retained()["d/h1/dn/assignment"], Assignment).mode == "serve"
    assignments.assign("d1", "rest")
    assert decode(bench.retained()["d/d1/dn/assignment"], Assignment).version > left.version
    second.close()


def test_messages_of_another_fleet_on_the_same_broker_are_not_received(bench):
    foreign = bench.topics.root.replace("main", "other")
    transport = bench.connect("x1", None, lambda event: None)
    transport.publish(Packet(f"{foreign}/d/x1/up/state", encode(DeviceState("ready", "b1")), retain=True))
    bench.device("d1")
    bench.wait_for(full=1)
    assert set(bench.roster.table) == {"d1"}
    transport.close()


def test_a_retained_online_state_without_beats_does_not_block_a_new_server(stage, caplog):
    """Without a beat the lease has ended; `--takeover` is not needed."""
    early = stage.connect("early", None, lambda event: None)
    early.publish(Packet(stage.topics.server("state"), encode(ServerState(True, "old", 7)), retain=True))
    early.drain(WAIT_S)
    connection = ServerConnection(
        stage.connect, Journal(), limits=connector.LeaseLimits(settle_s=0.05, lease_s=0.5)
    )
    connection.open()
    assert connection.epoch == 8
    assert "published no beat for 0.5 s; replacing it" in caplog.text
    connection.close()
    early.close()


def test_what_a_slow_broker_retains_is_read(stage, broker):
    """The pause that ends reading begins with the broker's answer."""
    topic = stage.topics.server("state")
    early = stage.connect("early", None, lambda event: None)
    early.publish(Packet(topic, encode(ServerState(True, "old", 7)), retain=True))
    early.drain(WAIT_S)

    def slow(*arguments, **options):
        transport = stage.connect(*arguments, **options)
        broker.later(lambda: time.sleep(1.0))
        return transport

    assert connector.read_retained(slow, [topic], QUICK).keys() == {topic}
    early.close()


@pytest.mark.parametrize("epoch", [2**30, 2**40])
def test_an_epoch_out_of_range_is_ignored(stage, epoch):
    early = stage.connect("early", None, lambda event: None)
    poison = Packet(stage.topics.server("state"), encode(ServerState(False, "old", epoch)), retain=True)
    early.publish(poison)
    early.drain(WAIT_S)
    connection = ServerConnection(stage.connect, Journal(), limits=connector.LeaseLimits(settle_s=0.05))
    connection.open()
    assert connection.epoch == 1
    early.publish(poison)
    early.drain(WAIT_S)
    handled = threading.Event()  # one thread handles all messages in order
    connection.on("log", lambda message: handled.set())
    early.publish(Packet(stage.topics.up("early", "log"), encode(Log("info", "after it"))))
    assert handled.wait(WAIT_S)
    connection.check()
    assert connection.epoch == 1
    connection.close()
    early.close()


@pytest.mark.parametrize(
    "payload",
    [b"", b"rubbish", encode(ServerState(False, "old", 0)), encode(ServerState(True, "old", 2**30))],
    ids=["cleared", "malformed", "a late will", "an epoch out of range"],
)
def test_a_server_publishes_its_state_again_when_something_replaces_it(stage, payload):
    other = stage.connect("other", None, lambda event: None)
    connection = ServerConnection(stage.connect, Journal(), limits=connector.LeaseLimits(settle_s=0.05))
    connection.open()

    def state():
        kept = stage.retained().get("srv/state")
        return kept != payload and kept and decode(kept, ServerState)

    assert stage.eventually(lambda: state() and state().boot == connection.boot)
    other.publish(Packet(stage.topics.server("state"), payload, retain=True))
    other.drain(WAIT_S)
    assert stage.eventually(lambda: state() and state().boot == connection.boot and state().online)
    connection.check()
    connection.close()
    other.close()


def test_sequence_numbers_never_fall_below_those_in_the_registry():
    db = Database.open()
    registered_devices.record(db, [DeviceRecord("main", "d1", status="ready", seen_sequence=9 * 2**32)])
    with Journal(db, "main") as journal:
        journal.begin(1)
        journal.record_device(DeviceRecord("main", "d1", status="lost"))
    assert registered_devices.get(db, "main", "d1").seen_sequence > 9 * 2**32


def test_a_dead_journal_thread_ends_the_server(stage, monkeypatch):
    monkeypatch.setattr(registered_devices, "record", lambda db, records: 1 // 0)
    with (
        Journal(Database.open(), "main") as journal,
        connected(ServerConnection(stage.connect, journal)) as server,
    ):
        journal.record_device(DeviceRecord("main", "d1", status="ready"))
        assert stage.eventually(lambda: server.connection._lost)
        with pytest.raises(ConnectError, match="device states cannot be stored in the registry"):
            server.connection.check()
        monkeypatch.undo()


def test_everything_is_published_again_after_a_reconnect(bench, broker):
    """The broker knows the session, so nothing shows that its retained messages are old."""
    lost = []
    bench.connection.on_connected(lost.append)
    broker.drop("server-main")
    assert bench.eventually(lambda: lost == [False])


@contextmanager
def server_on(stage, db):
    with Journal(db) as journal:
        connection = ServerConnection(stage.connect, journal, limits=QUICK)
        Roster(connection)
        connection.open()
        journal.begin(connection.epoch)
        yield
        connection.close()


def statuses(db):
    return {device.device: device.status for device in registered_devices.listed(db, "main")}


def test_devices_become_unknown_in_the_registry_when_the_server_ends(stage):
    db = Database.open()
    stage.device("d1"), stage.device("d2")
    with server_on(stage, db):
        assert stage.eventually(lambda: statuses(db) == {"d1": "ready", "d2": "ready"})
        stage.devices[1].crash()
        assert stage.eventually(lambda: statuses(db) == {"d1": "ready", "d2": "lost"})
    assert statuses(db) == {"d1": "unknown", "d2": "lost"}


def test_a_new_server_does_not_trust_the_device_states_of_a_killed_one(stage):
    db, earlier = Database.open(), 5 * 2**32
    left = DeviceRecord("main", "left", "alert", activity="training", why="drift", seen_sequence=earlier)
    registered_devices.record(db, [left, DeviceRecord("main", "d1", "ready", seen_sequence=earlier + 1)])
    stage.device("d1")
    with server_on(stage, db):
        assert stage.eventually(lambda: statuses(db) == {"d1": "ready", "left": "unknown"})
        assert registered_devices.get(db, "main", "left").activity == "idle"


def test_a_server_whose_fleet_was_taken_over_marks_no_device_unknown(stage):
    db = Database.open()
    with server_on(stage, db):
        registered_devices.record(db, [DeviceRecord("main", "d1", "ready", seen_sequence=9 * 2**32)])
    assert statuses(db) == {"d1": "ready"}


def test_a_large_fleet_spreads_its_reconnections(bench):
    def return_s():
        return decode(bench.retained()["srv/state"], ServerState).return_s

    assert return_s() == 1.0
    bench.connection.spread_returns(120)
    assert return_s() == 1.0
    bench.connection.spread_returns(2000)
    assert bench.eventually(lambda: return_s() == 20.0)


def test_a_device_that_is_revoked_elsewhere_is_in_no_cohort(bench):
    bench.device("d1"), bench.device("d2")
    bench.wait_for(full=2)
    registered_devices.set_revoked(bench.inbox.journal.db, "main", {"d2"})
    assert bench.eventually(lambda: bench.roster.full_devices() == ["d1"])
    known = {device.device: device for device in registered_devices.listed(bench.inbox.journal.db, "main")}
    assert known["d1"].capability["tier"] == "full"
    assert 2**32 < known["d1"].seen_sequence < 2**33


def test_a_restart_counts_unless_the_agent_said_that_it_shuts_down(bench):
    """Neither does that of the server, which sees the present process of a device for the first time."""
    topics, db = bench.topics, bench.inbox.journal.db

    def say(*states: DeviceState) -> None:
        for state in states:
            packet = Packet(topics.up("d1", "state"), encode(state), retain=True)
            bench.connection.publish_packet(packet)
        last = states[-1]
        assert bench.eventually(lambda: (found := bench.roster.get("d1")) and found.state == last)

    def counted() -> dict[str, int]:
        return registered_devices.restarts(db, "main", 0)

    say(DeviceState("ready", "b1"))
    for old, new in (("b1", "b2"), ("b2", "b3")):  # an update, and other settings
        say(DeviceState("disconnected", old, why=Failure.SHUT_DOWN), DeviceState("ready", new))
    say(DeviceState("ready", "b3", 2), DeviceState("ready", "b3", 3))
    assert not bench.eventually(counted, 1.5)
    say(DeviceState("lost", "b3"), DeviceState("ready", "b4"))
    say(DeviceState("disconnected", "b4"), DeviceState("ready", "b5"))  # after an error
    say(DeviceState("ready", "b6"))
    assert bench.eventually(lambda: counted() == {"d1": 3})
