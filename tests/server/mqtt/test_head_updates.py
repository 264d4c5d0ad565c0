"""Head updates are validated, join their own part, and have no weight in others."""

import numpy as np
import pytest
import torch

from edge_fl.blob import describe
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts, same
from edge_fl.methods import METHODS, build_method
from edge_fl.methods.contract import steps, tiers
from edge_fl.wire import tensors
from edge_fl.wire.messages import Report
from edge_fl_server.mqtt.updates.inbox import STALE, HeadUpdates
from edge_fl_server.training import rounds
from edge_fl_server.training.clients import HybridClients
from edge_fl_server.training.engines.simulated import SequentialClients
from edge_fl_server.training.rounds import Plan, RunHooks
from tests.devices import graphs
from tests.server.conftest import FAR_S

IDS = ("d1", "d2")


class Sent(RunHooks):
    """Head updates that were received before the round."""

    def __init__(self, updates: list[Update]) -> None:
        self._updates = updates

    def head_updates(self) -> list[Update]:
        return self._updates


def one_round(bench, name, *heads: Update, **options):
    """Round 1 of simulated clients with head updates."""
    method = build_method(bench.spec(name, **options))
    fleet = SequentialClients({id: bench.client(id) for id in IDS}, method)
    return method, next(rounds.run(method, fleet, Plan(1, seed=1), hooks=Sent(heads)))


def head_update(method, part: str, samples: int = 1000) -> Update:
    generator = torch.Generator().manual_seed(3)
    params = {name: torch.rand(t.shape, generator=generator) for name, t in steps.start(method)[part].items()}
    return Update("a-head", samples, {part: params})


def test_the_global_head_of_a_head_only_device_enters_fedcrc_s_moving_average_and_nothing_else(bench):
    method, alone = one_round(bench, "fedcrc", tau=0.5)
    theirs = head_update(method, "global_head", samples=40)
    _, joined = one_round(bench, "fedcrc", theirs, tau=0.5)
    assert alone.shared.keys() == joined.shared.keys()
    for part in alone.shared:
        assert same(alone.shared[part], joined.shared[part]) == (part != "global_head")
    before = steps.start(method)["global_head"]
    for name, old in before.items():
        mean = (alone.shared["global_head"][name] - 0.5 * old) / 0.5  # of two clients with 20 samples each
        expected = 0.5 * old + 0.5 * (40 * mean + 40 * theirs.parts["global_head"][name]) / 80
        assert torch.allclose(joined.shared["global_head"][name], expected, atol=1e-5)
    assert joined.responded == IDS and joined.head_updates == ("a-head",)


def test_class_means_of_a_head_only_device_join_by_their_counts_and_leave_the_extractor_alone(bench):
    _, alone = one_round(bench, "fedcrl")
    means = {"mean": torch.full((1, 4), 9.0), "count": torch.tensor([0.0, 60.0, 0.0])}
    _, joined = one_round(bench, "fedcrl", Update("h", 60, {"prototypes": means}))
    assert same(alone.shared["extractor"], joined.shared["extractor"])
    ours, all_ = alone.shared["prototypes"], joined.shared["prototypes"]
    assert torch.equal(ours["mean"][0], all_["mean"][0]) and all_["count"][1] == ours["count"][1] + 60
    share = ours["count"][1] / (ours["count"][1] + 60)
    assert torch.allclose(all_["mean"][1], share * ours["mean"][1] + (1 - share) * 9.0, atol=1e-5)


@pytest.mark.parametrize("name", ["fedcp", "fedcrc", "fedcrl", "fedpac", "dualfed"])
def test_samples_of_head_only_devices_never_weigh_in_the_extractor(bench, name):
    if name not in METHODS:
        pytest.skip("not there yet")
    method, alone = one_round(bench, name)
    parts: Parts = {}
    for part in method.head_tier.updates:
        if part in method.net.parts:
            parts |= head_update(method, part).parts
    if "prototypes" in method.head_tier.updates:
        parts["prototypes"] = {"mean": torch.ones(3, 4), "count": torch.full((3,), 5.0)}
    if "spread" in method.head_tier.updates:
        parts["spread"] = {"V": torch.tensor(0.5), "H": torch.ones(3, 4)}
    _, joined = one_round(bench, name, Update("h", 10**6, parts))
    assert parts.keys() == method.head_tier.updates.keys()
    assert same(alone.shared["extractor"], joined.shared["extractor"])
    assert not same(alone.shared, joined.shared)


def test_the_sums_of_head_only_devices_calibrate_spherefed_s_head(bench):
    method = build_method(bench.spec("spherefed"))
    fleet = SequentialClients({id: bench.client(id) for id in IDS}, method)
    shared = steps.start(method)
    z = torch.nn.functional.normalize(torch.rand(30, 4, generator=torch.Generator().manual_seed(1)))
    labels = torch.eye(3)[torch.arange(30) % 3]
    sums = {"gram": z.T @ z, "moment": z.T @ labels}
    closed, _ = rounds.final_personalisation(
        method, fleet, shared, 1, Sent([Update("h", 30, {"sums": sums})])
    )
    alone, _ = rounds.final_personalisation(method, fleet, shared, 1)
    assert same(closed["extractor"], shared["extractor"]) and not same(closed["head"], alone["head"])


class HeadUpdateSender:
    """Head updates of a present device with 20 samples on a release of FedCRC or another method."""

    def __init__(self, bench, name: str) -> None:
        bench.device("h1", tier="head")
        bench.wait_for(heads=1)
        self.settled: list[str] = []
        self.method = build_method(bench.spec(name))
        plan = tiers.head_plan(self.method, 8)
        self.manifest = graphs.manifest_for(b"x", feature_dim=4, classes=["a", "b", "c"], heads=plan)
        self.head_updates = HeadUpdates(bench.roster, lambda device, report: self.settled.append(report.id))
        self.head_updates.open("rel-1", self.manifest, self.method)

    def send(self, parts, id: str = "rel-1", samples: int = 20):
        payload = tensors.pack(parts)
        blob = describe(payload, 1024)
        report = Report(id, "head", "b1", samples, blob=blob, release=1)
        first = self.head_updates.take_report("h1", report)
        for index in range(len(blob.chunks)):
            chunk = payload[1024 * index : 1024 * (index + 1)]
            first = self.head_updates.take_chunk("h1", id, index, chunk) or first
        return first


HEAD = {"weight": np.ones((3, 4), np.float32), "bias": np.ones(3, np.float32)}
MEANS = {"mean": np.ones((2, 4), np.float32), "count": np.array([5, 15, 0], np.float32)}


def test_a_valid_head_update_counts_once(bench):
    desk = HeadUpdateSender(bench, "fedcrc")
    verdict = desk.send({"global_head": HEAD})
    assert (verdict.status, verdict.reason, desk.settled) == ("accepted", "", ["rel-1"])
    (update,) = desk.head_updates.take()
    assert (update.client, update.samples, list(update.parts)) == ("h1", 20, ["global_head"])
    assert desk.head_updates.take() == []


BAD = {
    "extractor": ("fedcrc", {"extractor": HEAD}, 20, "upload_parts"),
    "shape": ("fedcrc", {"global_head": {**HEAD, "bias": np.ones(4, np.float32)}}, 20, "upload_tensors"),
    "nan": (
        "fedcrc",
        {"global_head": {**HEAD, "bias": np.full(3, np.nan, np.float32)}},
        20,
        "upload_tensors",
    ),
    "samples": ("fedcrc", {"global_head": HEAD}, 21, "upload_samples"),
    "personal": ("fedcrc", {"head": HEAD}, 20, "upload_parts"),
    "rows": ("fedcrl", {"prototypes": {**MEANS, "mean": np.ones((3, 4), np.float32)}}, 20, "upload_parts"),
    "width": ("fedcrl", {"prototypes": {**MEANS, "mean": np.ones((2, 5), np.float32)}}, 20, "upload_parts"),
    "counts": (
        "fedcrl",
        {"prototypes": {**MEANS, "count": np.array([5, 99, 0], np.float32)}},
        20,
        "upload_parts",
    ),
    "negative": (
        "fedcrl",
        {"prototypes": {**MEANS, "count": np.array([21, -1, 0], np.float32)}},
        20,
        "upload_parts",
    ),
    "names": ("fedcrl", {"prototypes": {"mean": np.ones((3, 4), np.float32)}}, 20, "upload_parts"),
    "sums": (
        "spherefed",
        {"sums": {"gram": np.ones((4, 3), np.float32), "moment": np.ones((4, 3), np.float32)}},
        20,
        "upload_parts",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_head_update_is_not_used_but_its_report_is_accepted(bench, case):
    name, parts, samples, reason = BAD[case]
    desk = HeadUpdateSender(bench, name)
    verdict = desk.send(parts, samples=samples)
    assert (verdict.status, verdict.reason) == ("accepted", reason)
    assert desk.settled == ["rel-1"] and desk.head_updates.take() == []


def test_a_head_update_on_an_earlier_release_is_not_used(bench):
    desk = HeadUpdateSender(bench, "fedcrc")
    desk.head_updates.open("rel-2", desk.manifest, desk.method)
    assert desk.send({"global_head": HEAD}).reason == STALE and desk.head_updates.take() == []


def test_a_late_head_update_joins_the_next_aggregation(bench):
    desk = HeadUpdateSender(bench, "fedcrc")
    desk.send({"global_head": HEAD})
    desk.head_updates.open("rel-2", desk.manifest, desk.method)
    assert len(desk.head_updates.take()) == 1


# hybrid: simulated clients and devices in one cohort


def hybrid(bench, spec, remote: tuple[str, ...], local: tuple[str, ...], simulated=None, **limits):
    method = build_method(spec)
    here = simulated or SequentialClients({id: bench.client(id) for id in local}, method)
    for id in remote:
        bench.device(id)
    bench.wait_for(full=len(remote))
    return method, HybridClients(bench.fleet(spec, **limits), here)


def test_hybrid_equals_simulation_to_the_bit(bench):
    spec = bench.spec("fedavg")
    everybody = {id: bench.client(id) for id in ("c1", "c2", "d1", "d2")}
    results = []
    for method, fleet in (
        hybrid(bench, spec, ("d1", "d2"), ("c1", "c2")),
        (build_method(spec), SequentialClients(everybody, build_method(spec))),
    ):
        *_, last = rounds.run(method, fleet, Plan(2, seed=1, evaluate_every=1))
        results.append((last, *rounds.final_personalisation(method.at(2), fleet, last.shared, 2)))
    (ours, shared, closing), (theirs, their_shared, their_closing) = results
    assert ours.responded == theirs.responded == ("c1", "c2", "d1", "d2")
    assert same(shared, their_shared) and ours.metrics == theirs.metrics and closing == their_closing


class Waiting(SequentialClients):
    """Simulated clients that start after the device received its request."""

    def each(self, step, round, method, downs):
        assert self.bench.eventually(lambda: self.bench.devices[0].assignments)
        yield from super().each(step, round, method, downs)


def test_devices_get_their_request_before_simulated_clients_start(bench):
    spec = bench.spec("fedavg")
    here = Waiting({"c1": bench.client("c1")}, build_method(spec))
    here.bench = bench
    method, fleet = hybrid(bench, spec, ("d1",), (), here)
    result = next(rounds.run(method, fleet, Plan(1, seed=1)))
    assert result.responded == ("c1", "d1")


class Slow(SequentialClients):
    """Simulated clients that take longer than the devices' deadline."""

    def each(self, step, round, method, downs):
        assert self.bench.eventually(lambda: self.bench.devices[0].acks)
        yield from super().each(step, round, method, downs)
        self.clock.passed = lambda: 1


def test_timely_responses_count_even_if_simulated_clients_take_longer(bench, clock):
    spec = bench.spec("fedavg")
    here = Slow({"c1": bench.client("c1")}, build_method(spec))
    here.bench, here.clock = bench, clock
    method, fleet = hybrid(bench, spec, ("d1",), (), here, deadline_s=FAR_S)
    assert next(rounds.run(method, fleet, Plan(1, seed=1))).responded == ("c1", "d1")
