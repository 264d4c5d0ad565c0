"""A full device trains exactly as the simulation does, and never sends its personal parts."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from edge_fl import metrics
from edge_fl.blob import describe, digest
from edge_fl.config import (
    CompressionConfig,
    MethodConfig,
    MethodSpec,
    ModelConfig,
    OptimiserConfig,
    PrivacyConfig,
)
from edge_fl.data.samples import ClientData, Samples
from edge_fl.failures import Failure
from edge_fl.heads.class_statistics import sums
from edge_fl.inputs import InputSpec
from edge_fl.learn import tree
from edge_fl.learn.batches import as_tensor
from edge_fl.learn.codec.differential_privacy import cost, epsilon
from edge_fl.learn.pictures import pixels
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.client import Client
from edge_fl.metrics import EPSILON
from edge_fl.wire.egress import STATISTICS
from edge_fl.wire.messages import Assignment, Capability, Round, SumRequest
from edge_fl.wire.tensors import pack, unpack
from edge_fl_devices.agent.effects import Fit, Train
from edge_fl_devices.agent.events import Failed, Finished
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.features.onnx_runtime import Runtime
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.full import FullWorker
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import fit_here
from edge_fl_devices.workers.worker import attempt
from tests.devices.scripted import TOPICS, ScriptedServer, running
from tools.memory_broker import InMemoryBroker, InMemoryTransport

NO_NOISE = PrivacyConfig()


def spec_for(method: str, kind: Any = "none", privacy: PrivacyConfig = NO_NOISE) -> MethodSpec:
    model = ModelConfig("cnn-tiny", {"feature_dim": 4, "width": 2})
    return MethodSpec(
        model,
        InputSpec((1, 8, 8)),
        ["a", "b", "c"],
        MethodConfig(method, 1, 4, OptimiserConfig(lr=0.1)),
        seed=3,
        compression=CompressionConfig(kind, keep=0.2),
        privacy=privacy,
    )


def samples(count: int, seed: int) -> Samples:
    rng = np.random.default_rng(seed)
    return Samples(rng.integers(0, 256, (count, 1, 8, 8), np.uint8), rng.integers(0, 3, count))


DATA = ClientData(samples(11, 0), samples(3, 1), samples(6, 2))


pytestmark = pytest.mark.usefixtures("one_thread")


def worker(folder: Path, data: ClientData = DATA) -> FullWorker:
    return FullWorker("pi-01", Store(folder), lambda classes, input: data)


def assign(mode: Any, round: int, down: bytes, attempt: int = 0) -> Assignment:
    return Assignment(round, mode, "t", round, f"t-{round}-{attempt}", describe(down))


def perform(worker: FullWorker, assignment: Assignment, spec: MethodSpec, down: bytes) -> Finished:
    done = worker.perform(Train(assignment, spec, "boot-1", 5), {digest(down): down})
    assert isinstance(done, Finished)
    return done


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *[(method, "none") for method in ("fedavg", "fedrep", "repper")],
        *[("fedrep", kind) for kind in ("fp16", "int8", "topk")],
    ],
)
def test_rounds_over_the_wire_equal_the_simulation_bit_for_bit(
    method: str, kind: str, tmp_path: Path
) -> None:
    spec = spec_for(method, kind)
    reference, device = build_method(spec), worker(tmp_path)
    client = Client("pi-01", DATA, 3, 4, spec.seed)
    shared, own = steps.start(reference), steps.start_own(reference, "pi-01")
    for round in (1, 2, 3):
        now = reference.at(round)
        down = steps.broadcast(now, shared, "pi-01")
        payload = pack(tree.to_arrays(down))
        update, own = client.train(now, round, down, own)
        report = perform(device, assign("train", round, payload), spec, payload).report
        blob = device.store.blob(report.id)
        assert blob is not None and report.blob == describe(blob)
        assert tree.same(tree.from_arrays(unpack(blob)), update.parts)
        assert report.samples == 11 and report.bytes_down == 5 and report.bytes_up > len(blob)
        assert report.compression == kind
        if kind == "topk" and round < 3:  # the next process continues with the stored error feedback
            device = worker(tmp_path)
        shared = steps.aggregate(now, shared, steps.received(now, [update], {"pi-01": down}))
        assert perform(
            device, assign("evaluate", round, payload, 9), spec, payload
        ).report.metrics == client.evaluate(now, down, own)
    last = pack(tree.to_arrays(steps.broadcast(now, shared, "pi-01")))
    closing, _ = client.personalise(now, 3, steps.broadcast(now, shared, "pi-01"), own)
    assert perform(device, assign("personalise", 3, last), spec, last).report.metrics == closing.metrics


def test_a_second_attempt_at_a_round_starts_from_the_same_personal_parts(tmp_path: Path) -> None:
    spec, device = spec_for("fedrep"), worker(tmp_path)
    payload = pack(
        tree.to_arrays(steps.broadcast(build_method(spec), steps.start(build_method(spec)), "pi-01"))
    )
    blobs = [
        device.store.blob(perform(device, assign("train", 1, payload, n), spec, payload).report.id)
        for n in (0, 1)
    ]
    assert blobs[0] == blobs[1]


def private_spec(updates: float) -> tuple[MethodSpec, bytes]:
    """A method spec whose budget allows so many updates, and its broadcast."""
    privacy = PrivacyConfig(noise_multiplier=1.0, clip=1.0)
    budget = epsilon(updates * cost(privacy), privacy.delta)
    spec = spec_for("fedavg", privacy=PrivacyConfig(1.0, 1.0, budget))
    spec = replace(spec, model=ModelConfig("cnn-tiny", {"feature_dim": 4, "width": 2, "norm": False}))
    return spec, pack(tree.to_arrays(steps.start(build_method(spec))))


def test_a_device_with_an_exhausted_budget_trains_no_more_in_any_process_run_or_attempt(
    tmp_path: Path,
) -> None:
    spec, payload = private_spec(2.5)
    spent = []
    for attempt_number in (0, 1):  # of one round, the second by another process: both were sent
        report = perform(worker(tmp_path), assign("train", 1, payload, attempt_number), spec, payload).report
        spent.append(report.metrics[EPSILON])
    assert spent == pytest.approx([epsilon(n * cost(spec.privacy), 1e-5) for n in (1, 2)], rel=1e-6)
    assignment = replace(assign("train", 1, payload, 2), run_id="another", id="another-1-0")
    failed = attempt(
        partial(worker(tmp_path).perform, Train(assignment, spec, "b", 0), {digest(payload): payload})
    )
    assert isinstance(failed, Failed) and failed.reason is Failure.BUDGET_EXHAUSTED
    assert not Store(tmp_path).blob(assignment.id)
    evaluated = perform(worker(tmp_path), assign("evaluate", 1, payload, 3), spec, payload).report
    assert metrics.GLOBAL_TEST in evaluated.metrics


def test_a_device_s_noise_cannot_be_drawn_by_the_server(tmp_path: Path) -> None:
    spec, payload = private_spec(9)
    method = build_method(spec)
    down = steps.start(method)
    update, _ = Client("pi-01", DATA, 3, 4, spec.seed).train(
        method, 1, down, steps.start_own(method, "pi-01")
    )
    sent = []
    for number in (0, 1):
        report = perform(worker(tmp_path), assign("train", 1, payload, number), spec, payload).report
        sent.append(tree.from_arrays(unpack(worker(tmp_path).store.blob(report.id) or b"")))
    for one, other in ((sent[0], sent[1]), (sent[0], update.parts)):
        apart = torch.cat([(one[p][n] - other[p][n]).flatten() for p, n in tree.leaves(one)])
        assert apart.std().item() == pytest.approx(2**0.5, rel=0.2)  # two noises of std 1, nothing in common


def test_the_owner_s_limit_holds_whatever_the_run_allows(tmp_path: Path) -> None:
    spec, payload = private_spec(100)

    def tried(spec: MethodSpec, epsilon: float) -> Any:
        limited = FullWorker("pi-01", Store(tmp_path), lambda classes, input: DATA, epsilon=epsilon)
        return attempt(
            partial(
                limited.perform, Train(assign("train", 1, payload), spec, "b", 0), {digest(payload): payload}
            )
        )

    assert tried(spec, 5.0).reason == Failure.BUDGET_EXHAUSTED  # one update spends 10
    assert isinstance(tried(spec, 11.0), Finished)
    rejected = tried(replace(spec, privacy=NO_NOISE), 1e6)
    assert rejected.reason == Failure.BUDGET_EXHAUSTED and "updates without noise" in rejected.detail


@pytest.mark.parametrize("torn", [b"", b"torn", pack({"other": {}})])
def test_an_unreadable_privacy_file_does_not_count_as_zero(torn: bytes, tmp_path: Path) -> None:
    spec, payload = private_spec(9)
    perform(worker(tmp_path), assign("train", 1, payload), spec, payload)
    (tmp_path / "privacy.safetensors").write_bytes(torn)
    failed = attempt(
        partial(
            worker(tmp_path).perform,
            Train(assign("train", 2, payload), spec, "b", 0),
            {digest(payload): payload},
        )
    )
    assert isinstance(failed, Failed) and failed.reason == Failure.BUDGET_EXHAUSTED
    assert "privacy.safetensors: the epsilon spent by this device cannot be read" in failed.detail


def test_images_of_another_size_are_resized_to_that_of_the_run(tmp_path: Path) -> None:
    spec = spec_for("fedavg")
    method = build_method(spec)
    payload = pack(tree.to_arrays(steps.broadcast(method, steps.start(method), "pi-01")))
    wide = Samples(np.zeros((4, 1, 9, 30), np.uint8), np.arange(4) % 3)
    device = worker(tmp_path, ClientData(wide, wide, wide))
    assert perform(device, assign("train", 1, payload), spec, payload).report.samples == 4


def test_a_run_with_other_channels_is_rejected_by_name(tmp_path: Path) -> None:
    other = Samples(np.zeros((4, 3, 8, 8), np.uint8), np.arange(4) % 3)
    device, spec = worker(tmp_path, ClientData(other, other, other)), spec_for("fedavg")
    failed = attempt(partial(device.perform, Train(assign("train", 1, b"x"), spec, "b", 0), None))
    assert (
        isinstance(failed, Failed)
        and failed.reason == "no_data"
        and failed.reason.final
        and "[3, 8, 8]" in failed.detail
    )


def test_a_device_without_samples_reports_no_data(tmp_path: Path) -> None:
    none = DATA.train.take(np.empty(0, np.int64))
    failed = attempt(
        partial(
            worker(tmp_path, ClientData(none, none, none)).perform,
            Train(assign("train", 1, b"x"), spec_for("fedavg"), "b", 0),
            None,
        )
    )
    assert isinstance(failed, Failed) and failed.reason == "no_data"


def full_device(folder: Path) -> Device:
    return Device("pi-01", TOPICS, Capability("full", "x86_64", "3.12", samples=11), worker(folder))


def test_two_rounds_over_a_broker_send_the_shared_part_and_nothing_else(tmp_path: Path) -> None:
    broker, spec = InMemoryBroker(), spec_for("fedrep")
    connect = partial(InMemoryTransport, broker)
    server, method = ScriptedServer(connect), build_method(spec)
    server.online()
    shared = steps.start(method)

    def idle(times: int) -> None:
        server.wait_for("pi-01", "state", lambda s: s.status == "ready" and s.activity == "idle", times)

    with running(full_device(tmp_path), connect=connect):
        idle(1)
        for round in (1, 2):
            payload = pack(tree.to_arrays(steps.broadcast(method, shared, "pi-01")))
            server.round(Round("t", round, 60, spec))
            server.assignment(
                "pi-01", "train", run_id="t", round=round, id=f"t-{round}-0", down=server.chunks(payload)
            )
            report = server.wait_for("pi-01", "rpt", number=round)
            assert report.id == f"t-{round}-0"
            sent = unpack(server.blob("pi-01", report))
            assert set(sent) == {"extractor"} and not report.error
            assert report.bytes_down == (len(payload) if round == 1 else 0)  # the same broadcast again
            server.ack("pi-01", report.id)
            idle(round + 1)
    statuses = [state.status for state in server.messages("pi-01", "state")]
    assert statuses[0] == "init" and statuses[-1] == "disconnected" and "alert" not in statuses
    assert Store(tmp_path).memory().done == ("t-1-0", "t-2-0") and Store(tmp_path).outbox() == []
    broker.close()


def test_an_update_that_was_not_acknowledged_is_sent_by_the_next_process(tmp_path: Path) -> None:
    broker, spec = InMemoryBroker(), spec_for("fedavg")
    connect = partial(InMemoryTransport, broker)
    server = ScriptedServer(connect)
    server.online()
    payload = pack(tree.to_arrays(steps.start(build_method(spec))))
    server.round(Round("t", 1, 60, spec))
    server.assignment("pi-01", "train", run_id="t", round=1, id="t-1-0", down=server.chunks(payload))
    with running(full_device(tmp_path), connect=connect):
        first = server.wait_for("pi-01", "rpt")
    device = full_device(tmp_path)
    with running(device, connect=connect):
        again = server.wait_for("pi-01", "rpt", number=2)
        assert again == first and again.boot != device.state.boot
        server.ack("pi-01", "t-1-0")
        server.wait_for(
            "pi-01",
            "state",
            lambda s: s.boot == device.state.boot and s.activity == "idle" and s.status == "ready",
        )
    assert Store(tmp_path).outbox() == []
    broker.close()


def test_a_full_device_trains_and_fits_heads_and_a_head_only_one_does_not_train(tmp_path: Path) -> None:
    loader = LocalFeatureLoader(lambda classes, input: DATA, tmp_path)
    store = Store(tmp_path)
    head, both = (
        HeadWorker(
            "pi-01",
            store,
            FitSettings("nearest"),
            loader=loader,
            fitter=fit_here,
            runtime=lambda: Runtime("1.20", 21),
            train=train,
        )
        for train in (None, worker(tmp_path).perform)
    )
    spec = spec_for("fedavg")
    down = pack(tree.to_arrays(steps.broadcast(build_method(spec), steps.start(build_method(spec)), "pi-01")))
    job = Train(assign("train", 1, down), spec, "boot-1", 0)
    fetched = {digest(down): down}
    assert head.perform(job, fetched) == Failed(Failure.UNSUPPORTED_TIER)
    assert isinstance(both.perform(job, fetched), Finished)
    fitted = both.perform(Fit(assign("serve", 1, down), "boot-1", 0), None)
    assert (
        isinstance(fitted, Failed) and fitted.reason == "incomplete"
    )  # its own job: no release is installed


STAMPS = iter("abcdefgh")


@pytest.mark.parametrize(
    ("settings", "privacy", "offered"),
    [
        ({}, PrivacyConfig(), True),
        ({"share": False}, PrivacyConfig(), False),
        ({}, PrivacyConfig(clip=1.0, noise_multiplier=1.0), False),
        ({"data_stamp": lambda: next(STAMPS)}, PrivacyConfig(), False),
    ],
    ids=["by default", "uploads = false", "with noise", "data that change"],
)
def test_class_statistics_are_prepared_with_the_final_broadcast(
    tmp_path: Path, settings: dict[str, Any], privacy: PrivacyConfig, offered: bool
) -> None:
    model = ModelConfig(
        "cnn-tiny", {"feature_dim": 4, "width": 2, "norm": False}
    )  # noise covers no BatchNorm
    spec = replace(spec_for("fedavg", privacy=privacy), model=model)
    method = build_method(spec)
    down = steps.broadcast(method, steps.start(method), "pi-01")
    payload = pack(tree.to_arrays(down))
    device = FullWorker("pi-01", Store(tmp_path), lambda classes, input: DATA, **settings)
    perform(device, assign("train", 3, payload), spec, payload)
    length = sums.shape_of(3, method.net.feature_dim).length
    request = SumRequest(STATISTICS, 4, length, extractor="1" * 64, trained="t/3")
    assert device.offer("s", request) is None  # only once the rounds are over
    perform(device, assign("personalise", 3, payload, 1), spec, payload)
    vector = device.offer("s", request)
    assert (vector is not None) is offered
    if vector is not None:
        z = steps.exported_features(method, down, pixels(as_tensor(DATA.train.x))).numpy()
        assert vector == pytest.approx(sums.of(z, DATA.train.y, 3).flat, abs=1e-5)
        device.commit("s", request, leaves=True)
        device.settle("s", ["pi-01"])
        assert device.offer("t", request) is None
