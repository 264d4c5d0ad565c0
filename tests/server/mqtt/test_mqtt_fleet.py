"""The fleet of real devices: bit-identical to simulation; a lost device, connection or broker does not stop a round."""

import threading
from functools import partial

import msgspec
import pytest

from edge_fl import metrics
from edge_fl.errors import RunError
from edge_fl.learn.tree import same
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.wire.messages import Assignment, Report, Request, decode, encode
from edge_fl.wire.transport import Packet
from edge_fl_server.recipes.recipe import CohortConfig
from edge_fl_server.registry import runs
from edge_fl_server.training import rounds
from edge_fl_server.training.clients import Broadcasts
from edge_fl_server.training.engines.simulated import SequentialClients
from edge_fl_server.training.rounds import Plan
from tests.server.conftest import FAR_S, WAIT_S
from tests.server.single_round import one_round, simulated_round

IDS = ("d1", "d2", "d3")


def held(until: threading.Event):
    """Hold a device's report back until an event."""
    return lambda mode, report, payload: [(report, payload)] if until.wait(WAIT_S) else []


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "repper", "fedavg+ft", "local"])
def test_devices_and_simulation_agree_to_the_bit(bench, name):
    spec = bench.spec(name)
    for id in IDS:
        bench.device(id)
    bench.wait_for(full=3)
    simulated = SequentialClients({id: bench.client(id) for id in IDS}, build_method(spec))
    results = {}
    for kind, fleet in (("mqtt", bench.fleet(spec)), ("simulated", simulated)):
        method = build_method(spec)
        plan = Plan(2, seed=1, evaluate_every=1)
        *_, last = rounds.run(method, fleet, plan)
        results[kind] = (last, *rounds.final_personalisation(method.at(2), fleet, last.shared, 2))
    (ours, our_shared, our_closing), (theirs, their_shared, their_closing) = (
        results["mqtt"],
        results["simulated"],
    )
    assert same(our_shared, their_shared)
    assert ours.metrics == theirs.metrics
    assert our_closing == their_closing
    assert any(metrics.PERSONAL_AFTER in found for found in our_closing.values())


def test_equal_broadcasts_are_sent_once_and_nothing_stays_retained(bench):
    sent = []
    publish = bench.connection.transport.publish
    # a spy, everything goes through
    bench.connection.transport.publish = lambda packet: (sent.append(packet), publish(packet))
    for id in IDS:
        bench.device(id)
    bench.wait_for(full=3)
    fleet, _ = one_round(bench, bench.spec("fedavg"))
    chunks = [packet.topic for packet in sent if "/art/" in packet.topic and packet.payload]
    assert len(chunks) == len(set(chunks)) == 1
    kept = bench.retained()
    assert not [topic for topic in kept if topic.startswith("art/")]
    assert {decode(kept[f"d/{id}/dn/assignment"], Assignment).mode for id in IDS} == {"rest"}
    fleet.close()
    kept = bench.retained()
    assert not [topic for topic in kept if topic.startswith(("art/", "round/")) or topic.endswith("/want")]


def test_a_straggler_is_not_waited_for_beyond_the_deadline(bench, clock):
    ended = threading.Event()
    bench.device("d1"), bench.device("d2", tamper=held(ended))
    bench.wait_for(full=2)
    clock.passed = lambda: bench.inbox.counts["accepted"]
    _, result = one_round(bench, bench.spec("fedavg"), deadline_s=FAR_S)
    ended.set()
    assert result.selected == ("d1", "d2")
    assert result.responded == ("d1",)
    late = bench.devices[1]
    assert bench.eventually(lambda: [ack.reason for ack in late.acks] == ["stale_round"])
    assert bench.inbox.counts["stale_round"] == 1
    assert same(result.shared, simulated_round(bench, bench.spec("fedavg"), ["d1"]).shared)


def test_a_round_below_its_quorum_reports_how_many_responded(bench, clock):
    bench.device("d1"), bench.device("d2", tamper=lambda *_: [])
    bench.wait_for(full=2)
    clock.passed = lambda: bench.inbox.counts["accepted"]
    with pytest.raises(RunError, match="1 of 2 clients responded, expected at least 2"):
        one_round(bench, bench.spec("fedavg"), quorum=1.0, deadline_s=FAR_S)


def test_a_lost_device_is_not_waited_for_until_the_deadline(bench):
    bench.device("d1")
    leaver = bench.device("d2", tamper=lambda *_: (leaver.crash(), [])[1])
    bench.wait_for(full=2)
    _, result = one_round(bench, bench.spec("fedavg"), deadline_s=FAR_S, lost_s=0.2)
    assert result.responded == ("d1",)


def test_a_device_that_restarts_during_a_round_still_responds(bench):
    bench.device("d1")
    tries = []

    def forgetful(mode, report, payload):
        tries.append(report.id)
        if len(tries) == 1:
            reborn.send(bench.topics.down("d2", "assignment"), b"", retain=True)  # the broker has lost it
            reborn.reboot("b2")
            return []
        return [(report, payload)]

    reborn = bench.device("d2", tamper=forgetful)
    bench.wait_for(full=2)
    _, result = one_round(bench, bench.spec("fedavg"), deadline_s=FAR_S, lost_s=WAIT_S)
    assert result.responded == ("d1", "d2")
    assert len(set(tries)) == 1


def test_a_report_before_its_chunks_counts_as_well(bench):
    bench.device("d1", chunks_first=False)
    bench.wait_for(full=1)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.responded == ("d1",)


def test_a_report_sent_twice_counts_once_and_is_acknowledged_twice(bench):
    device = bench.device("d1", tamper=lambda mode, report, payload: [(report, payload)] * 2)
    bench.wait_for(full=1)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.responded == ("d1",)
    assert bench.eventually(lambda: [ack.status for ack in device.acks] == ["accepted", "duplicate"])


def test_a_report_repeated_after_its_round_is_a_duplicate_and_not_late(bench):
    sent = []
    device = bench.device(
        "d1", tamper=lambda mode, report, payload: sent.append((report, payload)) or sent[-1:]
    )
    bench.wait_for(full=1)
    one_round(bench, bench.spec("fedavg"))
    device.report("t1", 1, *sent[0])
    assert bench.eventually(lambda: [ack.status for ack in device.acks] == ["accepted", "duplicate"])


def test_a_rejected_report_that_is_repeated_is_rejected_again_and_counts_once(bench):
    bench.device("d1")

    def twice(mode, report, payload):
        wrong = msgspec.structs.replace(report, samples=0)
        return [(wrong, payload), (wrong, payload)]

    rejected = bench.device("d2", tamper=twice)
    bench.wait_for(full=2)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.responded == ("d1",)
    assert bench.eventually(lambda: [ack.status for ack in rejected.acks] == ["rejected", "rejected"])


def test_a_report_of_another_device_or_round_is_rejected(bench):
    stranger = bench.device("h1", tier="head")

    def also_elsewhere(mode, report, payload):
        stranger.report("t1", 1, report, payload)
        stale.report("t1", 9, report, payload)
        stale.report("t2", 1, report, payload)
        return [(report, payload)]

    stale = bench.device("d1", tamper=also_elsewhere)
    bench.wait_for(full=1, heads=1)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.responded == ("d1",)
    assert bench.eventually(lambda: [ack.reason for ack in stranger.acks] == ["not_in_cohort"])
    assert bench.eventually(lambda: [ack.reason for ack in stale.acks][:2] == ["stale_round"] * 2)


def test_a_failed_device_is_acknowledged_and_not_waited_for(bench):
    bench.device("d1")
    failing = bench.device(
        "d2",
        tamper=lambda mode, report, payload: [(Report(report.id, "update", "b1", 20, error="enospc"), b"")],
    )
    bench.wait_for(full=2)
    _, result = one_round(bench, bench.spec("fedavg"), deadline_s=FAR_S)
    assert result.responded == ("d1",)
    assert bench.eventually(lambda: [ack.status for ack in failing.acks] == ["accepted"])


def test_a_device_may_request_chunks_and_its_assignment_again(bench):
    silent = bench.device("d1", tamper=lambda *_: [])
    bench.wait_for(full=1)
    method = build_method(bench.spec("fedavg"))
    fleet = bench.fleet(bench.spec("fedavg"))
    fleet.each("train", 1, method, Broadcasts(partial(steps.broadcast, method, steps.start(method)), ["d1"]))
    assignment = decode(bench.retained()["d/d1/dn/assignment"], Assignment)
    chunk = bench.topics.chunk(assignment.down.sha256, 0)
    bench.connection.transport.publish(Packet(chunk, b"", retain=True))
    silent.send(bench.topics.up("d1", "req"), encode(Request("r1", "chunks", assignment.down.sha256, [0])))
    assert bench.eventually(lambda: chunk.removeprefix(bench.topics.root + "/") in bench.retained("art/#"))
    before = len(silent.assignments)
    silent.send(bench.topics.up("d1", "req"), encode(Request("r2", "assignment")))
    assert bench.eventually(lambda: len(silent.assignments) > before)
    assert silent.assignments[-1] == assignment
    fleet.close()


def two_rounds(bench, spec, ids):
    """The last result of two rounds by devices, and by simulation."""
    results = []
    for fleet in (
        bench.fleet(spec),
        SequentialClients({id: bench.client(id) for id in ids}, build_method(spec)),
    ):
        *_, last = rounds.run(build_method(spec), fleet, Plan(2, seed=1))
        results.append(last)
    return results


@pytest.mark.broker
def test_over_a_real_broker_the_result_is_the_simulation_s(real_bench):
    for id in IDS:
        real_bench.device(id)
    real_bench.wait_for(full=3)
    ours, theirs = two_rounds(real_bench, real_bench.spec("fedrep"), IDS)
    assert ours.responded == theirs.responded == IDS
    assert same(ours.shared, theirs.shared)


@pytest.mark.broker
@pytest.mark.parametrize("forgetful", [False, True])
def test_a_broker_killed_during_a_round_loses_no_update(real_bench, own_mosquitto, forgetful):
    hit = []

    def cut(mode, report, payload):
        if not hit:
            hit.append(mode)
            own_mosquitto.kill()
            if forgetful:
                for file in own_mosquitto.settings.folder.rglob("mosquitto.db"):
                    file.unlink()
            own_mosquitto.start()
        return [(report, payload)]

    real_bench.device("d1", tamper=cut), real_bench.device("d2", delay_s=0.5)
    real_bench.wait_for(full=2)
    ours, theirs = two_rounds(real_bench, real_bench.spec("fedavg"), ("d1", "d2"))
    assert hit
    assert ours.responded == ("d1", "d2")
    assert same(ours.shared, theirs.shared)
    assert real_bench.inbox.counts["accepted"] == 4


def test_a_round_ends_at_its_goal_and_the_others_get_a_rest(bench):
    """The goal is two of four devices: the round does not wait for stragglers."""
    ended = threading.Event()
    bench.device("d1"), bench.device("d2")
    bench.device("d3", tamper=held(ended)), bench.device("d4", tamper=held(ended))
    bench.wait_for(full=4)
    spec = bench.spec("fedavg")
    method, fleet = build_method(spec), bench.fleet(spec, deadline_s=FAR_S)
    plan = Plan(1, seed=2, cohort=CohortConfig(participation=0.5, over_select=2.0))
    result = next(rounds.run(method, fleet, plan))
    assert (result.selected, result.responded) == (("d1", "d2", "d3", "d4"), ("d1", "d2"))
    states = {given.device: given.state for given in runs.requests_of(bench.inbox.journal.db, "t1")}
    assert states == {"d1": "succeeded", "d2": "succeeded", "d3": "cancelled", "d4": "cancelled"}
    ended.set()


def test_a_round_below_its_quorum_is_repeated_and_counts_each_device_once(bench, clock):
    silent = []

    def once(mode, report, payload):
        silent.append(report.id)
        return [] if len(silent) == 1 else [(report, payload)]

    bench.device("d1"), bench.device("d2", tamper=once)
    bench.wait_for(full=2)
    clock.passed = lambda: min(bench.inbox.counts["accepted"], 1)
    spec = bench.spec("fedrep")
    method, fleet = build_method(spec), bench.fleet(spec, deadline_s=FAR_S)
    result = next(rounds.run(method, fleet, Plan(1, seed=1, cohort=CohortConfig(quorum=1.0))))
    assert (result.responded, result.attempts) == (("d1", "d2"), 2)
    assert len(set(silent)) == 2
