"""The failure matrix: one test per row of PROTOCOL.md section 6, here or, where another part owns the row, where LINKED says.

Everything runs against a real mosquitto, and ends within its deadline.
"""

from __future__ import annotations

import ast
import resource
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from broker.config import Settings
from broker.mosquitto import Mosquitto
from edge_fl.config import CohortConfig
from edge_fl.errors import RunError
from edge_fl.learn.tree import same
from edge_fl.methods import build_method
from edge_fl.wire.messages import Capability, Command, DeviceState, Report, decode, encode
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.transport import Connected, Packet
from server.mqtt.journal import Journal
from server.registry import Database, reports, runs
from server.training import rounds
from server.training.engines.sequential import SequentialFleet
from server.training.rounds import Plan
from tests.failures.proxy import Proxy

pytestmark = pytest.mark.broker

ROOT = Path(__file__).parents[2]
KEEPALIVE_S = 2

LINKED: dict[int, tuple[str, ...]] = {
    1: ("tests/server/mqtt/test_mqtt_fleet.py::test_a_broker_killed_in_mid_round_costs_no_update",),
    2: (
        "tests/server/mqtt/test_mqtt_fleet.py::test_a_broker_killed_in_mid_round_costs_no_update",
        "tests/devices/storage/test_slots.py::test_a_killed_download_resumes_without_refetching",
    ),
    3: ("tests/failures/test_kill.py::test_the_server_dies",),
    4: (
        "tests/failures/test_kill.py::test_the_server_dies",
        "tests/server/release/test_repository.py::test_a_crash_before_the_timestamp_leaves_the_old_release_and_publishing_again_finishes",
    ),
    7: (
        "tests/server/mqtt/test_mqtt_fleet.py::test_a_report_sent_twice_counts_once_and_is_answered_twice",
        "tests/failures/test_kill.py::test_a_device_dies",
    ),
    9: ("tests/devices/agent/test_birth.py::test_a_command_that_was_retained_is_ignored",),
    12: (
        "tests/server/mqtt/test_bad_updates.py::test_malformed_packets_are_counted_by_sender_and_kind",
        "tests/edge_fl/wire/test_messages.py::test_a_valid_structure_with_any_wrong_value_in_it_gives_a_protocol_error_or_a_message",
    ),
    13: (
        "tests/server/mqtt/test_bad_updates.py::test_a_bad_update_is_refused_and_leaves_the_aggregate_as_if_its_device_were_not_there",
        "tests/server/mqtt/test_bad_updates.py::test_an_implausible_report_is_refused",
        "tests/server/mqtt/test_bad_updates.py::test_statistics_of_the_wrong_shape_do_not_reach_the_aggregate",
        "tests/server/mqtt/test_bad_updates.py::test_after_enough_bad_updates_nothing_of_a_device_counts",
    ),
    25: (
        "tests/edge_fl/wire/test_transport.py::test_a_listener_that_raises_is_logged_and_hears_the_next",
        "tests/server/mqtt/test_roster.py::test_a_handler_that_fails_does_not_stop_the_next_message",
    ),
    26: (
        "tests/server/mqtt/test_mqtt_fleet.py::test_a_straggler_is_not_waited_for_beyond_the_deadline",
        "tests/server/mqtt/test_mqtt_fleet.py::test_a_round_below_its_quorum_is_asked_anew_and_then_counts_each_device_once",
        "tests/server/orchestrate/test_fleet_run.py::test_a_missed_quorum_ends_the_run_as_failed",
    ),
    27: (
        "tests/server/mqtt/test_roster.py::test_a_second_server_is_refused_and_the_first_one_unharmed",
        "tests/server/mqtt/test_roster.py::test_a_state_that_a_lost_broker_left_behind_does_not_stand_in_the_way",
        "tests/server/mqtt/test_roster.py::test_takeover_over_a_real_broker_is_no_war_of_reconnects",
    ),
    28: (
        "tests/server/mqtt/test_roster.py::test_a_device_of_another_protocol_is_never_ready",
        "tests/devices/runtime/test_runner.py::test_a_device_whose_server_speaks_another_protocol_says_so",
    ),
}
"""Rows whose claim stands elsewhere already."""

OWNED_ELSEWHERE = {
    5: "releases", 6: "the Pi", 10: "releases", 11: "releases", 14: "releases", 15: "trust", 16: "releases", 22: "trust",
    23: "trust", 29: "the Pi", 30: "the Pi", 31: "the Pi", 32: "chaos",
}  # fmt: skip
"""Rows that other issues test, by whose they are."""


def test_every_row_has_a_test():
    here = {int(name.split("_")[2]) for name in globals() if name.startswith("test_row_")}
    assert here | LINKED.keys() | OWNED_ELSEWHERE.keys() == set(range(1, 33))


@pytest.mark.parametrize("link", sorted({connection for links in LINKED.values() for connection in links}))
def test_what_is_linked_exists(connection):
    file, _, name = connection.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def one_round(bench, method="fedavg", **limits):
    """Round 1 with all that are there, at least one of whom has to answer."""
    built = build_method(bench.spec(method))
    plan = Plan(1, seed=1, cohort=CohortConfig(quorum=0.01))
    return next(rounds.run(built, bench.fleet(bench.spec(method), **limits), plan))


def device_behind(bench, proxy, id, **fields):
    """A scripted device whose only way to the broker is the proxy."""
    whole, bench.connect = bench.connect, partial(MqttTransport, proxy.endpoint, keepalive_s=KEEPALIVE_S)
    try:
        return bench.device(id, **fields)
    finally:
        bench.connect = whole


def test_row_08_stale_future_and_unknown_reports_are_refused_by_name(real_bench):
    """A recording played back: another round, another task, an old id. Nothing of it counts."""
    bench = real_bench
    device = bench.device("d1")
    bench.wait_for(full=1)
    method = build_method(bench.spec("fedavg"))
    ours = rounds.run(method, bench.fleet(bench.spec("fedavg")), Plan(2, seed=1))
    next(ours)
    assert bench.eventually(lambda: len(device.acks) == 1)
    device.acks.clear()
    replayed = [("t1", 1, "t1-1-old-9"), ("t1", 7, "t1-7-future-1"), ("other", 1, "other-1-1")]
    for run_id, round, id in replayed:
        device.report(run_id, round, Report(id, "update", "b1", 20), b"")
    assert bench.eventually(lambda: [ack.reason for ack in device.acks] == ["stale_round"] * 3)
    kept = reports.rejections_of(bench.inbox.journal.db, "main")
    assert {(one.run, one.round) for one in kept} == {("t1", 1), ("t1", 7), ("other", 1)}
    alone = SequentialFleet({"d1": bench.client("d1")}, method)
    *_, theirs = rounds.run(method, alone, Plan(2, seed=1))
    assert same(next(ours).shared, theirs.shared)


def test_row_17_a_server_whose_disk_is_full_acknowledges_nothing(real_bench, tmp_path):
    """The run ends by name, and the device keeps its report until somebody answers."""
    bench = real_bench
    db = Database.open(tmp_path / "registry.sqlite")
    bench.inbox.journal = Journal(db)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(mode, report, payload):
        written = (tmp_path / "registry.sqlite-wal").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (written, before[1]))
        return [(report, payload)]

    device = bench.device("d1", tamper=fill)
    bench.wait_for(full=1)
    try:
        with pytest.raises(RunError, match="registry: cannot be written"):
            one_round(bench)
        assert not device.acks
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (parcel,) = device._unanswered.values()
    device.report(*parcel)
    assert bench.eventually(lambda: bool(device.acks))
    assert len(reports.of_run(db, "t1")) <= 1
    db.close()


def test_row_18_a_clock_that_is_wrong_changes_nothing(real_bench, monkeypatch):
    """Fifty years back, then two ahead, in mid-round: nothing is ordered by the wall clock."""
    bench = real_bench
    shift = iter([-50 * 31_557_600.0, 2 * 31_557_600.0])
    clock = time.time

    def jump(mode, report, payload):
        by = next(shift)
        monkeypatch.setattr(time, "time", lambda: clock() + by)
        return [(report, payload)]

    bench.device("d1", tamper=jump), bench.device("d2", tamper=jump)
    bench.wait_for(full=2)
    assert one_round(bench).answered == ("d1", "d2")


def test_row_19_a_slow_link_delivers_late_but_whole(real_bench, own_mosquitto):
    """400 ms each way and 16 KiB/s: the broadcast arrives, the update counts."""
    bench = real_bench
    with Proxy(own_mosquitto.endpoint, latency_s=0.4, bytes_per_s=16 * 1024) as proxy:
        device_behind(bench, proxy, "d1")
        bench.wait_for(full=1)
        assert one_round(bench, lost_s=20).answered == ("d1",)


def test_row_19_a_deadline_that_a_slow_link_misses_is_said_and_the_late_report_refused(
    real_bench, own_mosquitto
):
    bench = real_bench
    with Proxy(own_mosquitto.endpoint) as proxy:

        def slow_down(mode, report, payload):
            proxy.latency_s = 2.0
            return [(report, payload)]

        slow = device_behind(bench, proxy, "d1", tamper=slow_down)
        bench.device("d2")
        bench.wait_for(full=2)
        assert one_round(bench, deadline_s=1.5).answered == ("d2",)
        assert bench.eventually(lambda: [ack.reason for ack in slow.acks] == ["stale_round"], 20)
    states = {run_id.device: run_id.state for run_id in runs.requests_of(bench.inbox.journal.db, "t1")}
    assert states == {"d1": "timed_out", "d2": "succeeded"}


def test_row_20_a_black_hole_is_noticed_on_both_sides(real_bench, own_mosquitto):
    """Within 1.5 keep-alives and 5 s the server knows, and the device is back once the link is."""
    bench = real_bench
    with Proxy(own_mosquitto.endpoint) as proxy:
        device_behind(bench, proxy, "d1")
        bench.wait_for(full=1)
        proxy.swallow()
        assert bench.eventually(lambda: bench.roster.get("d1").state.status == "lost", 1.5 * KEEPALIVE_S + 8)
        proxy.heal()
        bench.roster.wait_for(full=1, deadline_s=20)
        assert one_round(bench).answered == ("d1",)


def test_row_21_a_flapping_device_restarts_no_round_and_asks_for_no_more(real_bench, own_mosquitto):
    bench = real_bench
    with Proxy(own_mosquitto.endpoint) as proxy:
        flapping = device_behind(bench, proxy, "d1", delay_s=3.0)
        bench.device("d2")
        bench.wait_for(full=2)
        method, fleet = build_method(bench.spec("fedavg")), bench.fleet(bench.spec("fedavg"), lost_s=10)
        round = rounds.run(method, fleet, Plan(1, seed=1))
        stop = threading.Event()

        def flap():
            while not stop.wait(0.7):
                proxy.cut()

        thread = threading.Thread(target=flap, daemon=True)
        thread.start()
        try:
            result = next(round)
        finally:
            stop.set()
            thread.join(5)
    assert (result.answered, result.attempts) == (("d1", "d2"), 1)
    assert len({assignment.id for assignment in flapping.assignments if assignment.mode == "train"}) == 1
    assert len({run_id.id for run_id in runs.requests_of(bench.inbox.journal.db, "t1")}) == 1


def test_row_24_more_than_a_thousand_messages_wait_for_a_device_that_is_away(mosquitto_program, tmp_path):
    """None is lost and none is said to be dropped."""
    with Mosquitto(Settings(tmp_path / "mosquitto", port=0), mosquitto_program) as broker:
        connect = partial(MqttTransport, broker.endpoint)
        away = connect("d1", None, lambda event: None)
        away.wait_connected(10)
        away.subscribe("efl/1/main/d/d1/dn/#")
        away.drain(10)
        time.sleep(0.3)
        away.close()
        server, dropped = connect("server", None, lambda event: said(event)), []

        def said(event):
            if isinstance(event, Packet) and event.topic.endswith("dropped"):
                dropped.append(int(event.payload))

        server.wait_connected(10)
        for number in range(1500):
            command = encode(Command(f"c-{number}", "rebirth"))
            server.publish(Packet("efl/1/main/d/d1/dn/cmd", command, expiry_s=60))
        server.drain(30)
        heard = []
        back = connect(
            "d1", None, lambda event: heard.append(event) if isinstance(event, Packet | Connected) else None
        )
        until = time.monotonic() + 30
        while len(heard) < 1501 and time.monotonic() < until:
            time.sleep(0.05)
        assert isinstance(heard[0], Connected) and heard[0].session_present
        assert [decode(packet.payload, Command).id for packet in heard[1:]] == [f"c-{n}" for n in range(1500)]
        server.subscribe("$SYS/broker/publish/messages/dropped")
        while not dropped and time.monotonic() < until:
            time.sleep(0.05)
        back.close(), server.close()
    assert dropped[-1:] == [0]
    assert "Outgoing messages are being dropped" not in broker.log_path.read_text()


def test_row_25_a_device_s_nonsense_leaves_the_thread_alive(real_bench):
    bench = real_bench
    device = bench.device("d1")
    bench.wait_for(full=1)
    bench.connection.on("log", lambda heard: 1 / 0)
    device.send(bench.topics.log("d1"), b'{"level": "info", "text": "x"}')
    device.send(bench.topics.state("d1"), encode(DeviceState("ready", "b1")), retain=True)
    device.send(bench.topics.meta("d1"), encode(Capability("full", "test", "3", samples=20)), retain=True)
    assert one_round(bench).answered == ("d1",)
    assert bench.connection._thread.is_alive()
