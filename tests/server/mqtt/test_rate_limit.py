"""The rate limit per device: what a correct device sends passes, a flooding device is dropped, named and quarantined."""

import subprocess
import sys
import time
from types import FrameType
from typing import Any

import pytest

from edge_fl.blob import CHUNK_BYTES, MAX_BLOB_BYTES
from edge_fl.methods import build_method
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet
from edge_fl_server.mqtt import device_packets
from edge_fl_server.mqtt.device_packets import MAX_MESSAGES, RateLimit
from edge_fl_server.recipes.recipe import CohortConfig
from edge_fl_server.registry import registered_devices
from edge_fl_server.training import rounds
from edge_fl_server.training.rounds import Plan
from tests.clock import Clock
from tests.sample import sample

TOPICS = Topics("main")
FLOOD = """
import sys, time
from paho.mqtt.client import CallbackAPIVersion, Client, MQTTv5
client = Client(CallbackAPIVersion.VERSION2, "flooder", protocol=MQTTv5)
client.connect("127.0.0.1", int(sys.argv[1]))
client.loop_start()
while True:
    for _ in range(100):
        client.publish(sys.argv[2], sys.argv[3], qos=0)
    time.sleep(0.04)  # 2,500 per second, which the broker can deliver together with the messages of the others
"""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def excess() -> list[tuple[str, int, str]]:
    return []


@pytest.fixture
def limit(clock, excess) -> RateLimit:
    return RateLimit(TOPICS, lambda *one: excess.append(one), {"blocked"}.__contains__, clock)


def test_messages_above_the_limit_are_dropped_and_reported_once_per_interval(limit, clock, excess):
    state, other = Packet(TOPICS.up("d1", "state"), b"{}"), Packet(TOPICS.up("d2", "log"), b"{}")
    admitted = sum(limit.admits(state) for _ in range(MAX_MESSAGES + 250))
    assert admitted == MAX_MESSAGES and limit.admits(other) and not excess
    clock.now_s += device_packets.INTERVAL_S
    assert limit.admits(state)  # a new interval
    assert excess == [
        (
            "d1",
            250,
            "3,250 messages and 0 MiB of chunks in 10 s, at most 3,000 and 1,024 MiB; 250 dropped",
        )
    ]
    clock.now_s += device_packets.INTERVAL_S
    assert limit.admits(other) and len(excess) == 1


def test_the_largest_update_with_its_repetition_and_a_busy_device_pass(limit):
    chunk = bytes(CHUNK_BYTES)
    for _ in range(2):
        for index in range(MAX_BLOB_BYTES // CHUNK_BYTES):
            assert limit.admits(Packet(TOPICS.up("d1", "blob", "r1", index), chunk))
    assert all(limit.admits(Packet(TOPICS.up("d1", "state"), b"{}")) for _ in range(MAX_MESSAGES))


def test_tiny_chunks_count_as_chunks_of_the_usual_size(limit):
    packets = [Packet(TOPICS.up("d1", "blob", "r1", index), b"x") for index in range(20_000)]
    assert sum(map(limit.admits, packets)) == 2 * MAX_BLOB_BYTES // CHUNK_BYTES


def test_a_blocked_device_has_a_tenth_of_the_limit(limit, clock, excess):
    state, chunk = (
        Packet(TOPICS.up("blocked", "state"), b"{}"),
        Packet(TOPICS.up("blocked", "blob", "r1", 0), b"x"),
    )
    assert sum(limit.admits(state) for _ in range(MAX_MESSAGES)) == MAX_MESSAGES // 10
    clock.now_s += device_packets.INTERVAL_S
    assert sum(limit.admits(chunk) for _ in range(2000)) == MAX_BLOB_BYTES // 5 // CHUNK_BYTES
    clock.now_s += device_packets.INTERVAL_S
    assert limit.admits(state)
    assert excess[0] == (
        "blocked",
        2700,
        "3,000 messages and 0 MiB of chunks in 10 s, at most 300 and 102 MiB; 2,700 dropped",
    )


def test_names_that_no_device_has_are_dropped_without_a_record(limit, clock, excess):
    for sender in ("operator", "Not A Name"):
        for _ in range(MAX_MESSAGES + 1):
            admitted = limit.admits(Packet(f"{TOPICS.root}/d/{sender}/up/state", b"{}"))
        assert not admitted
    clock.now_s += device_packets.INTERVAL_S
    assert limit.admits(Packet(TOPICS.server("state"), b"{}")) and not excess


def lines_of(limit: RateLimit, packets: list[Packet]) -> int:
    """The lines of Python that run for a second message of each device."""
    assert all(map(limit.admits, packets))
    lines, before = 0, sys.gettrace()

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        for packet in packets:
            limit.admits(packet)
    finally:
        sys.settrace(before)
    return lines


def test_a_message_costs_the_same_among_10000_devices(limit):
    few, many = (
        [Packet(TOPICS.up(f"{kind}-{number:05d}", "state"), b"{}") for number in range(count)]
        for kind, count in (("few", 10), ("many", 10_000))
    )
    per_message = lines_of(limit, few) // len(few)
    assert per_message < 40 and lines_of(limit, many) <= (per_message + 1) * len(many)


@pytest.mark.broker
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "kind",
    ["state", *sample(["log", "rpt", "blob", "malformed"], ["blob", "malformed"], pytest.mark.slow)],
)
def test_a_run_completes_next_to_a_flooding_device_which_is_quarantined(
    real_bench, own_mosquitto, monkeypatch, caplog, kind
):
    bench = real_bench
    monkeypatch.setattr(device_packets, "INTERVAL_S", 1.0)
    monkeypatch.setattr(device_packets, "MAX_MESSAGES", MAX_MESSAGES // 10)
    monkeypatch.setattr(device_packets, "MAX_CHUNK_BYTES", device_packets.MAX_CHUNK_BYTES // 10)
    topic, payload = {
        "state": (bench.topics.up("flooder", "state"), '{"status": "ready", "boot": "b1"}'),
        "log": (bench.topics.up("flooder", "log"), '{"level": "info", "text": "' + 1000 * "x" + '"}'),
        "rpt": (
            bench.topics.up("flooder", "rpt", "t1", 1),
            '{"id": "x", "kind": "update", "boot": "b1", "samples": 1}',
        ),
        "blob": (bench.topics.up("flooder", "blob", "t1-1", 0), 100 * "x"),
        "malformed": (bench.topics.up("flooder", "req"), "{"),
    }[kind]
    for id in ("d1", "d2", "d3"):
        bench.device(id)
    bench.wait_for(full=3)
    port = str(own_mosquitto.endpoint.port)
    flooder = subprocess.Popen([sys.executable, "-c", FLOOD, port, topic, payload])
    journal, method = bench.inbox.journal, build_method(bench.spec("fedavg"))

    def known() -> dict[str, Any]:
        return {one.device: one for one in registered_devices.listed(journal.db, "main")}

    def is_caught() -> bool:
        return journal.blocked("flooder") == "quarantined" and known()["flooder"].dropped > 1000

    try:
        fleet, plan = bench.fleet(bench.spec("fedavg")), Plan(60, seed=1, cohort=CohortConfig(quorum=1.0))
        found = []
        for result in rounds.run(method, fleet, plan):
            found.append((result.responded, result.attempts))
            time.sleep(0.1)
        assert bench.eventually(is_caught)
    finally:
        flooder.kill()
        flooder.wait()
    assert found == [(("d1", "d2", "d3"), 1)] * 60
    assert known()["flooder"].quarantine.startswith("3 reports rejected, the last one because of flooding (")
    named = [line for line in caplog.messages if line.startswith("flooder: ") and "dropped" in line]
    assert len(named) > 2, "its other lines do not use up those that say that it floods"
    assert all(not known()[id].blocked and not known()[id].dropped for id in ("d1", "d2", "d3"))
