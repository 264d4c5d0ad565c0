"""The fleet of real devices: equal to simulation, bit for bit, and nothing that a device sends can spoil or stop a round."""

from __future__ import annotations

import math
import time

import msgspec
import numpy as np
import pytest

from edge_fl import metrics
from edge_fl.config import CohortConfig
from edge_fl.errors import RunError
from edge_fl.learn.robust import Robust
from edge_fl.learn.tree import same
from edge_fl.methods import build_method, steps
from edge_fl.wire import tensors
from edge_fl.wire.blob import describe, split
from edge_fl.wire.messages import Report, Request, Want, decode, encode
from edge_fl.wire.transport import SAFETENSORS, Packet
from server import rounds
from server.fleets.sequential import SequentialFleet
from server.registry import reports, runs
from server.rounds import Plan

IDS = ("d1", "d2", "d3")


def one_round(bench, spec, *, shared=None, quorum=0.3, **limits):
    """Round 1 with all that are there -> (fleet, result)."""
    method = build_method(spec)
    fleet = bench.fleet(spec, **limits)
    plan = Plan(1, seed=1, cohort=CohortConfig(quorum=quorum))
    return fleet, next(rounds.run(method, fleet, plan, shared))


def simulated_round(bench, spec, ids):
    method = build_method(spec)
    fleet = SequentialFleet({id: bench.client(id) for id in ids}, method)
    return next(rounds.run(method, fleet, Plan(1, seed=1)))


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "repper", "fedavg+ft", "local"])
def test_devices_and_simulation_agree_to_the_bit(bench, name):
    spec = bench.spec(name)
    for id in IDS:
        bench.device(id)
    bench.wait_for(full=3)
    simulated = SequentialFleet({id: bench.client(id) for id in IDS}, build_method(spec))
    results = {}
    for kind, fleet in (("mqtt", bench.fleet(spec)), ("simulated", simulated)):
        method = build_method(spec)
        plan = Plan(2, seed=1, evaluate_every=1)
        *_, last = rounds.run(method, fleet, plan)
        results[kind] = (last, *rounds.close(method.at(2), fleet, last.shared, 2))
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
    publish = bench.link.transport.publish
    bench.link.transport.publish = lambda packet: (
        sent.append(packet),
        publish(packet),
    )  # a spy, everything goes through
    for id in IDS:
        bench.device(id)
    bench.wait_for(full=3)
    fleet, _ = one_round(bench, bench.spec("fedavg"))
    chunks = [packet.topic for packet in sent if "/art/" in packet.topic and packet.payload]
    assert len(chunks) == len(set(chunks)) == 1
    kept = bench.retained()
    assert not [topic for topic in kept if topic.startswith("art/")]
    assert {decode(kept[f"d/{id}/dn/want"], Want).mode for id in IDS} == {"rest"}
    fleet.close()
    kept = bench.retained()
    assert not [topic for topic in kept if topic.startswith(("art/", "round/")) or topic.endswith("/want")]


def test_a_straggler_is_not_waited_for_beyond_the_deadline(bench):
    bench.device("d1"), bench.device("d2", delay_s=3)
    bench.wait_for(full=2)
    started = time.monotonic()
    _, result = one_round(bench, bench.spec("fedavg"), deadline_s=1)
    assert result.asked == ("d1", "d2")
    assert result.answered == ("d1",)
    assert 0.9 < time.monotonic() - started < 2.5
    late = bench.devices[1]
    assert bench.eventually(lambda: [ack.reason for ack in late.acks] == ["stale_round"])
    assert bench.inbox.counts["stale_round"] == 1
    assert same(result.shared, simulated_round(bench, bench.spec("fedavg"), ["d1"]).shared)


def test_a_round_below_its_quorum_says_how_many_answered(bench):
    bench.device("d1"), bench.device("d2", tamper=lambda *_: [])
    bench.wait_for(full=2)
    with pytest.raises(RunError, match="1 of 2 clients answered, expected at least 2"):
        one_round(bench, bench.spec("fedavg"), quorum=1.0, deadline_s=1)


def test_a_lost_device_is_not_waited_for_until_the_deadline(bench):
    bench.device("d1")
    leaver = bench.device("d2", tamper=lambda *_: (leaver.crash(), [])[1])
    bench.wait_for(full=2)
    started = time.monotonic()
    _, result = one_round(bench, bench.spec("fedavg"), deadline_s=30, lost_s=0.2)
    assert result.answered == ("d1",)
    assert time.monotonic() - started < 5


def test_a_device_that_is_reborn_in_mid_round_still_answers(bench):
    bench.device("d1")
    tries = []

    def forgetful(mode, report, payload):
        tries.append(report.id)
        if len(tries) == 1:
            reborn.send(bench.topics.want("d2"), b"", retain=True)  # the broker has lost it
            reborn.reboot("b2")
            return []
        return [(report, payload)]

    reborn = bench.device("d2", tamper=forgetful)
    bench.wait_for(full=2)
    _, result = one_round(bench, bench.spec("fedavg"), deadline_s=20, lost_s=5)
    assert result.answered == ("d1", "d2")
    assert len(set(tries)) == 1


def test_a_report_before_its_chunks_counts_as_well(bench):
    bench.device("d1", chunks_first=False)
    bench.wait_for(full=1)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.answered == ("d1",)


def test_a_report_sent_twice_counts_once_and_is_answered_twice(bench):
    device = bench.device("d1", tamper=lambda mode, report, payload: [(report, payload)] * 2)
    bench.wait_for(full=1)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.answered == ("d1",)
    assert bench.eventually(lambda: [ack.status for ack in device.acks] == ["accepted", "duplicate"])


def test_a_report_that_comes_again_after_its_round_is_a_duplicate_and_not_late(bench):
    sent = []
    device = bench.device(
        "d1", tamper=lambda mode, report, payload: sent.append((report, payload)) or sent[-1:]
    )
    bench.wait_for(full=1)
    one_round(bench, bench.spec("fedavg"))
    device.report("t1", 1, *sent[0])
    assert bench.eventually(lambda: [ack.status for ack in device.acks] == ["accepted", "duplicate"])


def test_a_refused_report_that_comes_again_is_refused_again_and_counts_as_one_answer(bench):
    bench.device("d1")

    def twice(mode, report, payload):
        wrong = msgspec.structs.replace(report, samples=0)
        return [(wrong, payload), (wrong, payload)]

    refused = bench.device("d2", tamper=twice)
    bench.wait_for(full=2)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.answered == ("d1",)
    assert bench.eventually(lambda: [ack.status for ack in refused.acks] == ["rejected", "rejected"])


def test_a_stranger_and_a_wrong_round_are_refused(bench):
    stranger = bench.device("h1", tier="head")

    def also_elsewhere(mode, report, payload):
        stranger.report("t1", 1, report, payload)
        stale.report("t1", 9, report, payload)
        stale.report("t2", 1, report, payload)
        return [(report, payload)]

    stale = bench.device("d1", tamper=also_elsewhere)
    bench.wait_for(full=1, heads=1)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.answered == ("d1",)
    assert bench.eventually(lambda: [ack.reason for ack in stranger.acks] == ["not_in_cohort"])
    assert bench.eventually(lambda: [ack.reason for ack in stale.acks][:2] == ["stale_round"] * 2)


def changed(payload, change):
    """The payload with one tensor, the first of the extractor, changed."""
    parts = {part: dict(arrays) for part, arrays in tensors.unpack(payload).items()}
    name = sorted(parts["extractor"])[-1]
    parts["extractor"][name] = change(np.array(parts["extractor"][name]))
    return tensors.pack(parts)


def poisoned(array):
    array.flat[0] = math.nan
    return array


def with_part(payload, name):
    return tensors.pack({**tensors.unpack(payload), name: {"w": np.zeros(2, np.float32)}})


def without(payload, name):
    return tensors.pack({part: arrays for part, arrays in tensors.unpack(payload).items() if part != name})


BAD_PAYLOADS = {
    "nan": lambda payload: changed(payload, poisoned),
    "shape": lambda payload: changed(payload, lambda array: array[:1]),
    "dtype": lambda payload: changed(payload, lambda array: array.astype(np.float16)),
    "foreign part": lambda payload: with_part(payload, "own"),
    "no extractor": lambda payload: without(payload, "extractor"),
    "pickle": lambda payload: b"\x80\x04\x95" + payload,
    "cut": lambda payload: payload[:-1],
    "huge": lambda payload: changed(payload, lambda array: array * np.float32(1e8)),
}


@pytest.mark.parametrize("bad", BAD_PAYLOADS)
def test_a_bad_update_is_refused_and_leaves_the_aggregate_as_if_its_device_were_not_there(bench, bad):
    bench.device("d1")

    def tamper(mode, report, payload):
        payload = BAD_PAYLOADS[bad](payload)
        return [(msgspec.structs.replace(report, blob=describe(payload, 1024)), payload)]

    wrong = bench.device("d2", tamper=tamper)
    bench.wait_for(full=2)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.answered == ("d1",)
    assert bench.eventually(lambda: len(wrong.acks) == 1)
    assert wrong.acks[0].status == "rejected"
    assert wrong.acks[0].reason in ("tensors", "parts", "norm")
    (kept,) = reports.rejections_of(bench.inbox.journal.db, "main", device="d2")
    assert (kept.id, kept.round, kept.reason) == (wrong.acks[0].id, 1, wrong.acks[0].reason)
    assert kept.detail
    assert same(result.shared, simulated_round(bench, bench.spec("fedavg"), ["d1"]).shared)


BAD_REPORTS = {
    "no samples": ({"samples": 0}, "samples"),
    "more samples than it has": ({"samples": 21}, "samples"),
    "another kind": ({"kind": "evaluation"}, "wrong_kind"),
    "no blob": ({"blob": None}, "no_parts"),
    "too large": ({"blob": describe(bytes(8 * 2**20))}, "too_large"),
}


@pytest.mark.parametrize("bad", BAD_REPORTS)
def test_an_implausible_report_is_refused(bench, bad):
    change, reason = BAD_REPORTS[bad]
    bench.device("d1")
    wrong = bench.device(
        "d2", tamper=lambda mode, report, payload: [(msgspec.structs.replace(report, **change), payload)]
    )
    bench.wait_for(full=2)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.answered == ("d1",)
    assert bench.eventually(lambda: [ack.reason for ack in wrong.acks] == [reason])


def test_a_device_that_gives_up_is_answered_and_not_waited_for(bench):
    bench.device("d1")
    failing = bench.device(
        "d2",
        tamper=lambda mode, report, payload: [(Report(report.id, "update", "b1", 20, error="enospc"), b"")],
    )
    bench.wait_for(full=2)
    started = time.monotonic()
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.answered == ("d1",)
    assert time.monotonic() - started < 10
    assert bench.eventually(lambda: [ack.status for ack in failing.acks] == ["accepted"])


def test_a_wrong_chunk_is_not_believed_and_the_right_one_mends_it(bench):
    def poisoning(mode, report, payload):
        right = [bytes(chunk) for chunk in split(payload, 1024)]
        for chunk in (bytes(len(right[0])), right[0]):
            device.send(bench.topics.report("d1", "t1", 1), encode(report))
            device.send(bench.topics.blob("d1", report.id, 0), chunk, content_type=SAFETENSORS)
        for index, chunk in enumerate(right[1:], 1):
            device.send(bench.topics.blob("d1", report.id, index), chunk, content_type=SAFETENSORS)
        return []

    device = bench.device("d1", tamper=poisoning)
    bench.wait_for(full=1)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.answered == ("d1",)


def test_malformed_packets_are_counted_by_sender_and_kind(bench):
    def noisy(mode, report, payload):
        topic = bench.topics.report("d1", "t1", 1)
        for content in (b"{", b'{"id": NaN}', b"[" * 5000, b"\xff", encode(report)[:-1]):
            device.send(topic, content)
        device.send(bench.topics.blob("d1", report.id, 0), b"x", content_type="application/zip")
        device.send(f"{bench.topics.root}/d/d1/up/nonsense", b"{}")
        return [(report, payload)]

    device = bench.device("d1", tamper=noisy)
    bench.wait_for(full=1)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.answered == ("d1",)
    assert bench.link.refused == {"d1 rpt": 5, "d1 blob": 1, "d1 nonsense": 1}


def test_chunks_that_nobody_asked_for_take_no_memory(bench):
    endless = bench.device("d1", tamper=lambda *_: [])
    bench.wait_for(full=1)
    method = build_method(bench.spec("fedavg"))
    fleet = bench.fleet(bench.spec("fedavg"))
    downs = rounds.Broadcasts(method, steps.start(method), ["d1"])
    updates = fleet.train(1, method, downs)
    exchange = fleet._question.exchange
    for index in range(64):
        endless.send(bench.topics.blob("d1", exchange.id, index), bytes(200_000), content_type=SAFETENSORS)
    bench.link.transport.drain(5)
    assert bench.eventually(lambda: "d1" in exchange._uploads)
    held = sum(map(len, exchange._uploads["d1"].early.values()))
    assert held <= exchange._expected.max_bytes < 64 * 200_000
    fleet.close()
    assert list(updates) == []


def test_a_device_may_ask_for_chunks_and_for_its_want_again(bench):
    silent = bench.device("d1", tamper=lambda *_: [])
    bench.wait_for(full=1)
    method = build_method(bench.spec("fedavg"))
    fleet = bench.fleet(bench.spec("fedavg"))
    fleet.train(1, method, rounds.Broadcasts(method, steps.start(method), ["d1"]))
    want = decode(bench.retained()["d/d1/dn/want"], Want)
    chunk = bench.topics.chunk(want.down.sha256, 0)
    bench.link.transport.publish(Packet(chunk, b"", retain=True))
    silent.send(bench.topics.request("d1"), encode(Request("r1", "chunks", want.down.sha256, [0])))
    assert bench.eventually(lambda: chunk.removeprefix(bench.topics.root + "/") in bench.retained("art/#"))
    before = len(silent.wants)
    silent.send(bench.topics.request("d1"), encode(Request("r2", "want")))
    assert bench.eventually(lambda: len(silent.wants) > before)
    assert silent.wants[-1] == want
    fleet.close()


def two_rounds(bench, spec, ids):
    """The last result of two rounds by devices, and by simulation."""
    results = []
    for fleet in (
        bench.fleet(spec),
        SequentialFleet({id: bench.client(id) for id in ids}, build_method(spec)),
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
    assert ours.answered == theirs.answered == IDS
    assert same(ours.shared, theirs.shared)


@pytest.mark.broker
@pytest.mark.parametrize("forgetful", [False, True])
def test_a_broker_killed_in_mid_round_costs_no_update(real_bench, own_mosquitto, forgetful):
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
    assert ours.answered == ("d1", "d2")
    assert same(ours.shared, theirs.shared)
    assert real_bench.inbox.counts["accepted"] == 4


BAD_STATISTICS = {
    "fedproto": ("prototypes", lambda part: {**part, "mean": part["mean"][:, :2]}),
    "fedgh": ("prototypes", lambda part: {**part, "count": part["count"][:2]}),
    "fedpac": ("spread", lambda part: {**part, "H": part["H"][0]}),
    "fedkd": ("change", lambda part: {name: array for name, array in part.items() if "left" not in name}),
}


@pytest.mark.parametrize("method", BAD_STATISTICS)
def test_statistics_of_the_wrong_shape_do_not_reach_the_aggregate(bench, method):
    part, spoil = BAD_STATISTICS[method]

    def tamper(mode, report, payload):
        parts = tensors.unpack(payload)
        payload = tensors.pack({**parts, part: spoil(parts[part])})
        return [(msgspec.structs.replace(report, blob=describe(payload, 1024)), payload)]

    bench.device("d1"), bench.device("d2", tamper=tamper)
    bench.wait_for(full=2)
    _, result = one_round(bench, bench.spec(method))
    assert result.answered == ("d1",)
    assert [found.reason for found in reports.rejections_of(bench.inbox.journal.db, "main")] == ["parts"]


def test_after_enough_bad_updates_nothing_of_a_device_counts(bench):
    def tamper(mode, report, payload):
        payload = changed(payload, poisoned)
        return [(msgspec.structs.replace(report, blob=describe(payload, 1024)), payload)]

    bench.device("d1")
    wrong = bench.device("d2", tamper=tamper)
    bench.wait_for(full=2)
    method = build_method(bench.spec("fedavg"))
    plan = Plan(5, seed=1, cohort=CohortConfig(quorum=0.3))
    asked = [result.asked for result in rounds.run(method, bench.fleet(bench.spec("fedavg")), plan)]
    assert asked == [("d1", "d2")] * 3 + [("d1",)] * 2
    assert bench.inbox.journal.barred("d2") == "quarantined"
    wrong.report("t1", 5, Report("t1-5-x", "update", "b1", 20), b"")
    assert bench.eventually(lambda: wrong.acks[-1].reason == "quarantined")
    assert len(reports.rejections_of(bench.inbox.journal.db, "main")) == 3


def test_a_round_ends_with_its_goal_and_puts_the_others_to_rest(bench):
    """Of four, two are wanted and three asked: the straggler is not waited for."""
    for id in ("d1", "d2", "d3", "d4"):
        bench.device(id, delay_s=0.0 if id in ("d1", "d2") else 4.0)
    bench.wait_for(full=4)
    started = time.monotonic()
    method, fleet = build_method(bench.spec("fedavg")), bench.fleet(bench.spec("fedavg"))
    plan = Plan(1, seed=2, cohort=CohortConfig(participation=0.5, over_select=2.0))
    result = next(rounds.run(method, fleet, plan))
    assert time.monotonic() - started < 3.5
    assert (result.asked, result.answered) == (("d1", "d2", "d3", "d4"), ("d1", "d2"))
    states = {given.device: given.state for given in runs.tasks_of(bench.inbox.journal.db, "t1")}
    assert states == {"d1": "succeeded", "d2": "succeeded", "d3": "removed", "d4": "removed"}


def test_a_round_below_its_quorum_is_asked_anew_and_then_counts_each_device_once(bench):
    silent = []

    def once(mode, report, payload):
        silent.append(report.id)
        return [] if len(silent) == 1 else [(report, payload)]

    bench.device("d1"), bench.device("d2", tamper=once)
    bench.wait_for(full=2)
    method, fleet = build_method(bench.spec("fedrep")), bench.fleet(bench.spec("fedrep"), deadline_s=1.5)
    result = next(rounds.run(method, fleet, Plan(1, seed=1, cohort=CohortConfig(quorum=1.0))))
    assert (result.answered, result.attempts) == (("d1", "d2"), 2)
    assert len(set(silent)) == 2


def test_the_median_over_devices_is_not_moved_by_one_of_them(bench):
    def tamper(mode, report, payload):
        payload = changed(payload, lambda array: array + np.float32(50))
        return [(msgspec.structs.replace(report, blob=describe(payload, 1024)), payload)]

    bench.device("d1"), bench.device("d2", tamper=tamper), bench.device("d3")
    bench.wait_for(full=3)
    method, fleet = build_method(bench.spec("fedavg")), bench.fleet(bench.spec("fedavg"))
    result = next(rounds.run(method, fleet, Plan(1, seed=1, robust=Robust("median"))))
    assert result.answered == IDS
    longest = max(float(t.abs().max()) for t in result.shared["extractor"].values() if t.is_floating_point())
    assert longest < 5
