"""Bad messages of devices do not change an aggregate or fill the server's memory, and all are counted."""

import math
from collections import Counter
from functools import partial

import msgspec
import numpy as np
import pytest
import torch

from edge_fl.blob import describe, split
from edge_fl.errors import RunError
from edge_fl.fields import MAX_SAMPLES
from edge_fl.learn.aggregation.robust import Robust
from edge_fl.learn.tree import same
from edge_fl.logs import AT_ONCE, EVERY_S
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.wire import tensors
from edge_fl.wire.messages import Log, Report, encode
from edge_fl.wire.transport import SAFETENSORS
from edge_fl_server.mqtt.updates.validation import MAX_STEPS, RejectedError, counter_range, require_buffers
from edge_fl_server.recipes.recipe import CohortConfig
from edge_fl_server.training import rounds
from edge_fl_server.training.clients import Broadcasts
from edge_fl_server.training.rounds import Plan
from tests.clock import Clock
from tests.rejections import rejections_of
from tests.server.single_round import one_round, simulated_round


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
    "scaled by -900": lambda payload: changed(payload, lambda array: array * np.float32(-900)),
}


@pytest.mark.parametrize("bad", BAD_PAYLOADS)
def test_a_rejected_update_leaves_the_aggregate_as_without_its_device(bench, bad):
    bench.device("d1")

    def tamper(mode, report, payload):
        payload = BAD_PAYLOADS[bad](payload)
        return [(msgspec.structs.replace(report, blob=describe(payload, 1024)), payload)]

    wrong = bench.device("d2", tamper=tamper)
    bench.wait_for(full=2)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.responded == ("d1",)
    assert bench.eventually(lambda: len(wrong.acks) == 1)
    assert wrong.acks[0].status == "rejected"
    assert wrong.acks[0].reason in ("tensors", "parts", "norm")
    (kept,) = rejections_of(bench.inbox.journal.db, "main", device="d2")
    assert (kept.id, kept.round, kept.reason) == (wrong.acks[0].id, 1, wrong.acks[0].reason)
    assert kept.detail
    assert same(result.shared, simulated_round(bench, bench.spec("fedavg"), ["d1"]).shared)


def test_a_rejected_update_is_one_line_in_the_log_with_its_reason(bench, caplog):
    def tamper(mode, report, payload):
        payload = changed(payload, poisoned)
        return [(msgspec.structs.replace(report, blob=describe(payload, 1024)), payload)]

    bench.device("d1")
    wrong = bench.device("d2", tamper=tamper)
    bench.wait_for(full=2)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.responded == ("d1",)
    assert bench.eventually(lambda: len(wrong.acks) == 1)  # sent after the line is written
    (line,) = [record.getMessage() for record in caplog.records if getattr(record, "device", "") == "d2"]
    assert " of d2: rejected, tensors: tensor 'extractor" in line and "has NaN or infinity" in line


def test_a_claimed_number_of_samples_does_not_decide_the_aggregate(bench):
    """One device announces and reports as many samples as it may; its update weighs as at most three times the cohort's median."""
    for id in ("d1", "d2", "d3"):
        bench.device(id)
    claim = MAX_SAMPLES
    bench.device(
        "liar",
        samples=claim,
        tamper=lambda mode, report, payload: [(msgspec.structs.replace(report, samples=claim), payload)],
    )
    bench.wait_for(full=4)
    method = build_method(bench.spec("fedavg"))
    broadcasts = Broadcasts(partial(steps.broadcast, method, steps.start(method)), ["d1", "d2", "d3", "liar"])
    received = {
        u.client: u.samples for u in bench.fleet(bench.spec("fedavg")).each("train", 1, method, broadcasts)
    }
    capped = received.pop("liar")
    assert set(received) == {"d1", "d2", "d3"} and capped == 3 * 20
    unlimited = bench.fleet(bench.spec("fedavg"), max_weight=0).each("train", 2, method, broadcasts)
    assert {update.samples for update in unlimited if update.client == "liar"} == {claim}


def test_a_claim_that_grows_counts_as_twice_the_previous_update(bench):
    claims = iter((20, 60, 60))
    for id in ("d1", "d2", "d3"):
        bench.device(id)
    bench.device(
        "grows",
        samples=100,
        tamper=lambda mode, report, payload: [
            (msgspec.structs.replace(report, samples=next(claims)), payload)
        ],
    )
    bench.wait_for(full=4)
    method, fleet = build_method(bench.spec("fedavg")), bench.fleet(bench.spec("fedavg"))
    broadcasts = Broadcasts(
        partial(steps.broadcast, method, steps.start(method)), ["d1", "d2", "d3", "grows"]
    )
    counted = [
        {u.client: u.samples for u in fleet.each("train", round, method, broadcasts)}["grows"]
        for round in (1, 2, 3)
    ]
    assert counted == [20, 40, 60]


BUFFER = "buffer:extractor.convolutions.1."
BAD_BUFFERS = {
    "negative variance": ("running_var", -0.001, "variance -0.001, expected at least 0"),
    "counter without bound": ("num_batches_tracked", 2**62, f"{2**62} to {2**62}, expected 0 to 1000000"),
    "negative counter": ("num_batches_tracked", -1, "-1 to -1, expected 0 to 1000000"),
}


def with_buffer(payload, name, value):
    parts = {part: dict(arrays) for part, arrays in tensors.unpack(payload).items()}
    parts["extractor"][BUFFER + name] = np.full_like(parts["extractor"][BUFFER + name], value)
    return tensors.pack(parts)


@pytest.mark.parametrize("bad", BAD_BUFFERS)
def test_buffers_that_no_training_gives_are_rejected(bench, bad):
    name, value, detail = BAD_BUFFERS[bad]

    def tamper(mode, report, payload):
        payload = with_buffer(payload, name, value)
        return [(msgspec.structs.replace(report, blob=describe(payload, 1024)), payload)]

    bench.device("d1"), bench.device("d2", tamper=tamper)
    bench.wait_for(full=2)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.responded == ("d1",)
    (kept,) = rejections_of(bench.inbox.journal.db, "main", device="d2")
    assert kept.reason == "buffers" and kept.detail.endswith(f"extractor.{BUFFER}{name}: {detail}")
    assert same(result.shared, simulated_round(bench, bench.spec("fedavg"), ["d1"]).shared)


def test_counters_may_grow_from_the_values_of_the_broadcast():
    params = {"buffer:bn.num_batches_tracked": torch.tensor(7 * MAX_STEPS), "w": torch.zeros(2)}
    assert counter_range({"extractor": params}) == (0, 7 * MAX_STEPS)
    grown = {**params, "buffer:bn.num_batches_tracked": torch.tensor(8 * MAX_STEPS)}
    require_buffers("extractor", grown, (0, 7 * MAX_STEPS), whole=True)
    with pytest.raises(RejectedError, match="buffers"):
        require_buffers("extractor", grown, (0, 7 * MAX_STEPS - 1), whole=True)


def test_buffers_are_checked_wherever_they_are_among_the_tensors():
    params = {"w": torch.zeros(2), "buffer:bn.running_var": torch.tensor([1.0, -0.5]), "z": torch.zeros(2)}
    with pytest.raises(RejectedError, match=r"bn.running_var: variance -0.5, expected at least 0"):
        require_buffers("extractor", params, (0, 0), whole=True)
    require_buffers("extractor", params, (0, 0), whole=False)  # a statistic may have negative entries


BAD_REPORTS = {
    "no samples": ({"samples": 0}, "samples"),
    "more samples than it has": ({"samples": 21}, "samples"),
    "another kind": ({"kind": "evaluation"}, "wrong_kind"),
    "no blob": ({"blob": None}, "no_parts"),
    "too large": ({"blob": describe(bytes(8 * 2**20))}, "too_large"),
}


@pytest.mark.parametrize("bad", BAD_REPORTS)
def test_an_implausible_report_is_rejected(bench, bad):
    change, reason = BAD_REPORTS[bad]
    bench.device("d1")
    wrong = bench.device(
        "d2", tamper=lambda mode, report, payload: [(msgspec.structs.replace(report, **change), payload)]
    )
    bench.wait_for(full=2)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.responded == ("d1",)
    assert bench.eventually(lambda: [ack.reason for ack in wrong.acks] == [reason])


def test_a_wrong_chunk_is_dropped_and_the_right_one_completes_the_update(bench):
    def poisoning(mode, report, payload):
        right = [bytes(chunk) for chunk in split(payload, 1024)]
        for chunk in (bytes(len(right[0])), right[0]):
            device.send(bench.topics.up("d1", "rpt", "t1", 1), encode(report))
            device.send(bench.topics.up("d1", "blob", report.id, 0), chunk, content_type=SAFETENSORS)
        for index, chunk in enumerate(right[1:], 1):
            device.send(bench.topics.up("d1", "blob", report.id, index), chunk, content_type=SAFETENSORS)
        return []

    device = bench.device("d1", tamper=poisoning)
    bench.wait_for(full=1)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.responded == ("d1",)


def test_malformed_packets_are_counted_by_sender_and_kind(bench):
    def noisy(mode, report, payload):
        topic = bench.topics.up("d1", "rpt", "t1", 1)
        for content in (b"{", b'{"id": NaN}', b"[" * 5000, b"\xff", encode(report)[:-1]):
            device.send(topic, content)
        device.send(bench.topics.up("d1", "blob", report.id, 0), b"x", content_type="application/zip")
        device.send(f"{bench.topics.root}/d/d1/up/nonsense", b"{}")
        return [(report, payload)]

    device = bench.device("d1", tamper=noisy)
    bench.wait_for(full=1)
    _, result = one_round(bench, bench.spec("fedavg"))
    assert result.responded == ("d1",)
    assert bench.connection.malformed == {"d1 rpt": 5, "d1 blob": 1, "d1 nonsense": 1}


def test_malformed_packets_of_one_device_do_not_fill_the_log(bench, caplog):
    device = bench.device("d1", tamper=lambda *_: [])
    bench.wait_for(full=1)
    for _ in range(250):
        device.send(bench.topics.up("d1", "rpt", "t1", 1), b"{")
    assert bench.eventually(lambda: bench.connection.malformed["d1 rpt"] == 250)
    lines = [line for line in caplog.messages if "/d/d1/up/rpt/" in line]
    assert len(lines) == 3 and "(100 malformed messages of this kind)" in lines[-1]


FLOODS = {
    "stale reports": lambda topics, number: (
        topics.up("d1", "rpt", "t1", 1),
        Report(f"r{number}", "update", "boot", 1),
    ),
    "log lines": lambda topics, number: (topics.up("d1", "log"), Log("error", f"line {number}")),
    "unknown kinds": lambda topics, number: (f"{topics.root}/d/d1/up/kind{number}", Log("info", "x")),
}


def test_no_message_of_a_device_fills_the_log(bench, caplog):
    """280 stale reports a second wrote as many lines, its own log lines had no limit, and unknown kinds wrote one line each."""
    bench.inbox.journal.lines._clock = Clock()  # no time passes
    device = bench.device("d1", tamper=lambda *_: [])
    bench.device("d2", tamper=lambda *_: [])
    bench.wait_for(full=2)
    for flood in FLOODS.values():
        for number in range(100):
            topic, message = flood(bench.topics, number)
            device.send(topic, encode(message))
    device.send(bench.topics.up("d2", "log"), encode(Log("warning", "of another device")))
    assert bench.eventually(lambda: "of another device" in caplog.text)
    assert bench.connection.malformed.total() == 100 and bench.inbox.counts["stale_round"] == 100
    lines = [record for record in caplog.records if getattr(record, "device", "") == "d1"]
    assert len(lines) == AT_ONCE and sum("d1" in message for message in caplog.messages) == AT_ONCE
    bench.inbox.journal.lines._clock.now_s += EVERY_S
    device.send(bench.topics.up("d1", "log"), encode(Log("warning", "later")))
    assert bench.eventually(lambda: "d1: later (290 more lines of d1 were left out)" in caplog.text)


@pytest.mark.parametrize("error", [RunError("the registry is full"), KeyError("a fault of this server")])
def test_a_failure_that_a_device_causes_again_and_again_does_not_fill_the_log(bench, caplog, error):
    def fail(received):
        raise error

    bench.inbox.journal.lines._clock = Clock()
    device = bench.device("d1", tamper=lambda *_: [])
    bench.wait_for(full=1)
    handled = Counter()
    bench.connection.on("rpt", lambda received: handled.update(["rpt"]))
    bench.connection.on("rpt", fail)
    for number in range(100):
        device.send(bench.topics.up("d1", "rpt", "t1", 1), encode(Report(f"r{number}", "update", "boot", 1)))
    assert bench.eventually(lambda: handled["rpt"] == 100)
    lines = [record for record in caplog.records if getattr(record, "device", "") == "d1"]
    assert len(lines) == AT_ONCE and any(record.exc_info for record in lines) == isinstance(error, KeyError)


def test_unrequested_chunks_take_no_memory(bench):
    endless = bench.device("d1", tamper=lambda *_: [])
    bench.wait_for(full=1)
    method = build_method(bench.spec("fedavg"))
    fleet = bench.fleet(bench.spec("fedavg"))
    downs = Broadcasts(partial(steps.broadcast, method, steps.start(method)), ["d1"])
    updates = fleet.each("train", 1, method, downs)
    (round_request,) = (opened.request for opened in fleet._open.values())
    for index in range(64):
        endless.send(
            bench.topics.up("d1", "blob", round_request.id, index), bytes(200_000), content_type=SAFETENSORS
        )
    bench.connection.transport.drain(5)
    assert bench.eventually(lambda: "d1" in round_request._uploads)
    held = sum(map(len, round_request._uploads["d1"].early.values()))
    assert held <= round_request.validator.expected.max_bytes < 64 * 200_000
    fleet.close()
    assert list(updates) == []


BAD_STATISTICS = {  # method, part, the reason of its rejection, and how the part is spoilt
    "rows": ("fedproto", "prototypes", "parts", lambda part: {**part, "mean": part["mean"][:, :2]}),
    "classes": ("fedgh", "prototypes", "parts", lambda part: {**part, "count": part["count"][:2]}),
    "counts": ("fedpac", "prototypes", "parts", lambda part: {**part, "count": part["count"] * 1000}),
    "mean": ("fedcrl", "prototypes", "norm", lambda part: {**part, "mean": part["mean"] + 1e30}),
    "sum": ("fedcgs", "sums", "norm", lambda part: {**part, "gram": part["gram"] - 1e12}),
    "spread": ("fedpac", "spread", "parts", lambda part: {**part, "H": part["H"][0]}),
    "bias": ("feddbe", "feature_mean", "parts", lambda part: {**part, "mean": part["mean"][:1]}),
    "factors": ("fedkd", "change", "parts", lambda part: {n: t for n, t in part.items() if "left" not in n}),
}


@pytest.mark.parametrize("case", BAD_STATISTICS)
def test_statistics_of_wrong_shape_or_size_do_not_reach_the_aggregate(bench, case):
    method, part, reason, spoil = BAD_STATISTICS[case]

    def tamper(mode, report, payload):
        parts = tensors.unpack(payload)
        payload = tensors.pack({**parts, part: spoil(parts[part])})
        return [(msgspec.structs.replace(report, blob=describe(payload, 1024)), payload)]

    bench.device("d1"), bench.device("d2", tamper=tamper)
    bench.wait_for(full=2)
    _, result = one_round(bench, bench.spec(method))
    assert result.responded == ("d1",)
    assert [found.reason for found in rejections_of(bench.inbox.journal.db, "main")] == [reason]


def test_a_device_is_quarantined_after_enough_bad_updates(bench):
    def tamper(mode, report, payload):
        payload = changed(payload, poisoned)
        return [(msgspec.structs.replace(report, blob=describe(payload, 1024)), payload)]

    bench.device("d1")
    wrong = bench.device("d2", tamper=tamper)
    bench.wait_for(full=2)
    method = build_method(bench.spec("fedavg"))
    plan = Plan(5, seed=1, cohort=CohortConfig(quorum=0.3))
    asked = [result.selected for result in rounds.run(method, bench.fleet(bench.spec("fedavg")), plan)]
    assert asked == [("d1", "d2")] * 3 + [("d1",)] * 2
    assert bench.inbox.journal.blocked("d2") == "quarantined"
    wrong.report("t1", 5, Report("t1-5-x", "update", "b1", 20), b"")
    assert bench.eventually(lambda: wrong.acks[-1].reason == "quarantined")
    assert len(rejections_of(bench.inbox.journal.db, "main")) == 3


def test_the_median_over_devices_is_not_moved_by_one_of_them(bench):
    def tamper(mode, report, payload):
        payload = changed(payload, lambda array: array + np.float32(50))
        return [(msgspec.structs.replace(report, blob=describe(payload, 1024)), payload)]

    bench.device("d1"), bench.device("d2", tamper=tamper), bench.device("d3")
    bench.wait_for(full=3)
    method = build_method(bench.spec("fedavg"))
    fleet = bench.fleet(bench.spec("fedavg"), max_growth=0)
    result = next(rounds.run(method, fleet, Plan(1, seed=1, robust=Robust("median"))))
    assert result.responded == ("d1", "d2", "d3")
    longest = max(float(t.abs().max()) for t in result.shared["extractor"].values() if t.is_floating_point())
    assert longest < 5
