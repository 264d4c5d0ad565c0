"""The failure matrix of docs/protocol.md: every row links to a test that exists, and the tests of rows that no other module covers.

These run against a real mosquitto.
"""

import ast
import re
import resource
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from edge_fl.errors import RunError
from edge_fl.learn.tree import same
from edge_fl.methods import build_method
from edge_fl.wire.messages import Capability, Command, DeviceState, Report, decode, encode
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.transport import Connected, Packet
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.recipes.recipe import CohortConfig
from edge_fl_server.registry import Database, registered_reports, runs
from edge_fl_server.training import rounds
from edge_fl_server.training.engines.simulated import SequentialClients
from edge_fl_server.training.rounds import Plan
from tests.failures.points import POINTS, located
from tests.failures.proxy import Proxy
from tests.rejections import rejections_of
from tests.server.conftest import FAR_S, WAIT_S, Stage

pytestmark = pytest.mark.broker

ROOT = Path(__file__).parents[2]
KEEPALIVE_S = 2
FLAPS = 4
DETECTED_S = 30.0  # 1.5 keep-alives and 5 s on an idle machine; 45 s with the standard keep-alive

TEST_LINK = re.compile(r"\[`(test_\w+)`\]\(\.\./(tests/[\w/]+\.py)\)")
ROW = re.compile(r"\| (\d+) \|.*\| ([^|]*) \|")
OWN_ROW = re.compile(r"test_row_(\d\d)_")


def matrix() -> list[tuple[int, str]]:
    """(row number, cell with its tests) of every row of the failure matrix in docs/protocol.md."""
    section = (ROOT / "docs/protocol.md").read_text().partition(". Failure matrix\n")[2].partition("\n## ")[0]
    return [(int(row[1]), row[2]) for row in map(ROW.fullmatch, section.splitlines()) if row]


def links() -> list[tuple[int, str, str]]:
    """(row number, test, file) of every link in the matrix."""
    return [(row, name, file) for row, cell in matrix() for name, file in TEST_LINK.findall(cell)]


def functions_of(file: Path) -> set[str]:
    """Names of the test functions at the top level of a module."""
    nodes = ast.parse(file.read_text()).body
    return {
        node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_the_failure_matrix_has_45_rows_and_each_links_a_test():
    assert [row for row, _ in matrix()] == list(range(1, 46))
    for row, cell in matrix():
        assert TEST_LINK.fullmatch(cell.split(", ")[0]), f"row {row}: no test"
        assert all(TEST_LINK.fullmatch(link) for link in cell.split(", ")), f"row {row}: {cell}"


@pytest.mark.parametrize(("row", "name", "file"), links())
def test_a_linked_test_exists(row, name, file):
    assert (ROOT / file).is_file(), f"row {row}: no file {file}"
    assert name in functions_of(ROOT / file), f"row {row}: {file} has no {name}"


def test_the_failure_matrix_links_every_test_of_a_row_in_this_folder():
    linked = {(row, name) for row, name, _ in links()}
    names = [name for file in Path(__file__).parent.glob("test_*.py") for name in functions_of(file)]
    ours = {(int(found[1]), name) for name in names if (found := OWN_ROW.match(name))}
    assert ours and ours <= linked, sorted(ours - linked)
    assert {(row, name) for row, name in linked if OWN_ROW.match(name)} == ours


@pytest.mark.parametrize("point", POINTS)
def test_a_point_at_which_a_process_is_killed_exists(point):
    owner, name = located(POINTS[point])
    assert callable(getattr(owner, name))


def one_round(bench, method="fedavg", **limits):
    """Run round 1 with all devices; one response is enough for the quorum."""
    built = build_method(bench.spec(method))
    plan = Plan(1, seed=1, cohort=CohortConfig(quorum=0.01))
    return next(rounds.run(built, bench.fleet(bench.spec(method), **limits), plan))


def after(happened):
    """A device that reports after something has happened."""
    return lambda mode, report, payload: [(report, payload)] if Stage.eventually(happened) else []


def device_behind(bench, proxy, id, **fields):
    """A scripted device that connects through the proxy."""
    direct, bench.connect = bench.connect, partial(MqttTransport, proxy.endpoint, keepalive_s=KEEPALIVE_S)
    try:
        return bench.device(id, **fields)
    finally:
        bench.connect = direct


def test_row_08_stale_future_and_unknown_reports_are_rejected_with_a_reason(real_bench):
    """Replayed reports with an old id, of a future round and of another run do not change the aggregate."""
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
    db, expected = bench.inbox.journal.db, {("t1", 1), ("t1", 7), ("other", 1)}
    assert bench.eventually(lambda: {(one.run, one.round) for one in rejections_of(db, "main")} == expected)
    alone = SequentialClients({"d1": bench.client("d1")}, method)
    *_, theirs = rounds.run(method, alone, Plan(2, seed=1))
    assert same(next(ours).shared, theirs.shared)


def test_row_17_a_server_with_a_full_disk_acknowledges_nothing(real_bench, tmp_path):
    """The run ends with a reason, and the device keeps its report until it is acknowledged."""
    bench = real_bench
    db = Database.open(tmp_path / "registry.sqlite")
    bench.inbox.journal = Journal(db)
    bench.server = replace(bench.server, journal=bench.inbox.journal)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(mode, report, payload):
        written = (tmp_path / "registry.sqlite-wal").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (written, before[1]))
        return [(report, payload)]

    device = bench.device("d1", tamper=fill)
    bench.wait_for(full=1)
    try:
        with pytest.raises(RunError, match="registry: write failed"):
            one_round(bench)
        assert not device.acks
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (parcel,) = device._unacknowledged.values()
    device.report(*parcel)
    assert bench.eventually(lambda: bool(device.acks))
    assert len(registered_reports.of_run(db, "t1")) <= 1
    db.close()


def test_row_18_a_wrong_clock_does_not_affect_a_round(real_bench, monkeypatch):
    """The clock jumps 50 years back, then 2 years ahead, during the round: nothing is ordered by wall-clock time."""
    bench = real_bench
    shift = iter([-50 * 31_557_600.0, 2 * 31_557_600.0])
    clock = time.time

    def jump(mode, report, payload):
        by = next(shift)
        monkeypatch.setattr(time, "time", lambda: clock() + by)
        return [(report, payload)]

    bench.device("d1", tamper=jump), bench.device("d2", tamper=jump)
    bench.wait_for(full=2)
    assert one_round(bench).responded == ("d1", "d2")


def test_row_19_a_slow_link_delivers_complete_messages(real_bench, own_mosquitto):
    """With 400 ms each way and 16 KiB/s the broadcast arrives and the update counts."""
    bench = real_bench
    with Proxy(own_mosquitto.endpoint, latency_s=0.4, bytes_per_s=16 * 1024) as proxy:
        device_behind(bench, proxy, "d1")
        bench.wait_for(full=1)
        assert one_round(bench, lost_s=20).responded == ("d1",)


def test_row_19_a_report_after_the_deadline_is_rejected(real_bench, own_mosquitto, clock):
    """The link keeps the report of d1 back until the deadline has passed, which is as soon as d2 has responded."""
    bench = real_bench
    with Proxy(own_mosquitto.endpoint) as proxy:

        def slow_down(mode, report, payload):
            proxy.pause()
            return [(report, payload)]

        slow = device_behind(bench, proxy, "d1", tamper=slow_down)
        bench.device("d2", tamper=after(lambda: bool(slow._unacknowledged)))
        bench.wait_for(full=2)
        clock.passed = lambda: bench.inbox.counts["accepted"]
        assert one_round(bench, deadline_s=FAR_S, lost_s=FAR_S).responded == ("d2",)
        proxy.resume()
        assert bench.eventually(lambda: [ack.reason for ack in slow.acks][:1] == ["stale_round"])
    states = {request.device: request.state for request in runs.requests_of(bench.inbox.journal.db, "t1")}
    assert states == {"d1": "timed_out", "d2": "succeeded"}


def test_row_20_both_sides_detect_a_half_open_connection(real_bench, own_mosquitto):
    """The server sees `lost` within 1.5 keep-alives and 5 s; the device returns with the link."""
    bench = real_bench
    with Proxy(own_mosquitto.endpoint) as proxy:
        device_behind(bench, proxy, "d1")
        bench.wait_for(full=1)
        proxy.drop_data()
        assert bench.eventually(lambda: bench.roster.get("d1").state.status == "lost", DETECTED_S)
        proxy.heal()
        bench.roster.wait_for(full=1, deadline_s=WAIT_S)
        assert one_round(bench).responded == ("d1",)


def test_row_21_a_flapping_device_restarts_no_round_and_adds_no_request(real_bench, own_mosquitto):
    bench = real_bench
    with Proxy(own_mosquitto.endpoint) as proxy:
        flapped = threading.Event()
        flapping = device_behind(bench, proxy, "d1", tamper=after(flapped.is_set))
        bench.device("d2")
        bench.wait_for(full=2)
        method, fleet = build_method(bench.spec("fedavg")), bench.fleet(bench.spec("fedavg"), lost_s=WAIT_S)
        round = rounds.run(method, fleet, Plan(1, seed=1))

        def flap():
            assert bench.eventually(lambda: bool(flapping.assignments))
            for number in range(FLAPS):
                assert bench.eventually(lambda number=number: proxy.accepted > number)
                flapping._transport.wait_connected(WAIT_S)
                proxy.cut()
                assert bench.eventually(lambda number=number: len(losses) > number)
            flapped.set()

        losses = []
        bench.connection.on(
            "state", lambda received: losses.append(1) if received.message.status == "lost" else None
        )
        thread = threading.Thread(target=flap, daemon=True)
        thread.start()
        result = next(round)
        thread.join(WAIT_S)
        assert flapped.is_set()
    assert (result.responded, result.attempts) == (("d1", "d2"), 1)
    assert len({assignment.id for assignment in flapping.assignments if assignment.mode == "train"}) == 1
    assert len({request.id for request in runs.requests_of(bench.inbox.journal.db, "t1")}) == 1


@pytest.mark.timeout(400)
def test_row_24_over_a_thousand_queued_messages_reach_an_offline_device(mosquitto_program, tmp_path):
    """All arrive in order, and the broker reports none as dropped."""
    with Mosquitto(BrokerSettings(tmp_path / "mosquitto", port=0), mosquitto_program) as broker:
        connect = partial(MqttTransport, broker.endpoint)
        away = connect("d1", None, lambda event: None)
        away.wait_connected(WAIT_S)
        away.subscribe("efl/1/main/d/d1/dn/#")
        away.drain(WAIT_S)
        away.close()
        server, dropped = connect("server", None, lambda event: on_event(event)), []

        def on_event(event):
            if isinstance(event, Packet) and event.topic.endswith("dropped"):
                dropped.append(int(event.payload))

        server.wait_connected(WAIT_S)
        for number in range(1500):
            command = encode(Command(f"c-{number}", "rebirth"))
            server.publish(Packet("efl/1/main/d/d1/dn/cmd", command, expiry_s=60))
        server.drain(WAIT_S)
        received = []
        back = connect(
            "d1",
            None,
            lambda event: received.append(event) if isinstance(event, Packet | Connected) else None,
        )
        until = time.monotonic() + 2 * WAIT_S
        while len(received) < 1501 and time.monotonic() < until:
            time.sleep(0.05)
        assert isinstance(received[0], Connected) and received[0].session_present
        assert [decode(packet.payload, Command).id for packet in received[1:]] == [
            f"c-{n}" for n in range(1500)
        ]
        server.subscribe("$SYS/broker/publish/messages/dropped")
        while not dropped and time.monotonic() < until:
            time.sleep(0.05)
        back.close(), server.close()
    assert dropped[-1:] == [0]
    assert "Outgoing messages are being dropped" not in broker.log_path.read_text()


def test_row_25_an_exception_in_a_handler_does_not_stop_the_receive_thread(real_bench):
    bench = real_bench
    device = bench.device("d1")
    bench.wait_for(full=1)
    bench.connection.on("log", lambda message: 1 / 0)
    device.send(bench.topics.up("d1", "log"), b'{"level": "info", "text": "x"}')
    device.send(bench.topics.up("d1", "state"), encode(DeviceState("ready", "b1")), retain=True)
    device.send(
        bench.topics.up("d1", "meta"), encode(Capability("full", "test", "3", samples=20)), retain=True
    )
    assert one_round(bench).responded == ("d1",)
    assert bench.connection._thread.is_alive()
