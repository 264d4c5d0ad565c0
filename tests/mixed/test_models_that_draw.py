"""A user's model with dropout and layers that draw by themselves gives the same bits on every engine, after a resumption, on a device, and
again in the same process; the surrounding program's generator is left as it was.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from edge_fl.config import MethodConfig, MethodSpec, ModelConfig, OptimiserConfig
from edge_fl.data.samples import ClientData, Samples
from edge_fl.inputs import InputSpec
from edge_fl.learn import tree
from edge_fl.methods import METHODS, build_method
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.client import Client
from edge_fl.models import MODELS
from edge_fl.wire.tensors import pack, unpack
from edge_fl_lab.research import run
from edge_fl_server.orchestrate import run as orchestrator
from edge_fl_server.recipes.recipe import Recipe, with_settings
from edge_fl_server.runs import checkpoint
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.rounds import RoundResult, RunHooks
from edge_fl_server.training.studies import ClientStore
from tests.devices.workers.test_full import assign, perform, worker
from tests.server.training.engines.test_engines import (
    outcome,
    pooled,
    sequential,
    store,
    vectorised,
)

METHODS_TRIED = ("fedavg", "fedrep", "ditto", "fedavg+ft")
NOISY, DROPPING = ModelConfig("tests.noisy:Noisy"), ModelConfig("tests.noisy:Dropping")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("model", [NOISY, DROPPING], ids=lambda model: model.name)
@pytest.mark.parametrize("name", METHODS_TRIED)
def test_every_engine_and_every_repetition_gives_the_same_bits(name: str, model: ModelConfig) -> None:
    at = store(name, model)
    expected, metrics = outcome(at, sequential)
    torch.manual_seed(9)  # a program's own draws in between
    for build in (sequential, pooled, vectorised):
        found, found_metrics = outcome(at, build)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[path], expected[path]) for path in expected), build.__name__
        assert found_metrics == metrics, build.__name__


def test_the_vectorised_engine_says_why_it_trains_client_by_client(caplog: pytest.LogCaptureFixture) -> None:
    at = store("fedavg", DROPPING)
    clients = vectorised(at)
    outcome(at, lambda at: clients)
    assert clients.engine == "vector, client by client: its network draws random numbers, as dropout does"


def test_draws_depend_on_round_client_and_seed_and_leave_the_program_s_generator_alone() -> None:
    at = store("fedavg", DROPPING)
    method = build_method(at.settings.spec)
    down = steps.start(method)
    one, other = (at[id] for id in [*at][:2])
    torch.manual_seed(4)
    before = torch.get_rng_state()
    first, again = (one.train(method, 1, down, {})[0].parts for _ in range(2))
    one.evaluate(method, down, {})
    one.personalise(method, 1, down, {})
    assert torch.equal(torch.get_rng_state(), before)
    assert tree.same(first, again)
    masks = []
    for client, round in ((one, 1), (one, 2), (other, 1)):
        with steps.seeded_for(method, "train", client.batches(round)):
            masks.append(torch.rand(8))
    assert not any(torch.equal(masks[i], masks[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def samples(count: int, seed: int) -> Samples:
    rng = np.random.default_rng(seed)
    return Samples(rng.integers(0, 256, (count, 1, 8, 8), np.uint8), rng.integers(0, 3, count))


@pytest.mark.parametrize("name", METHODS_TRIED)
def test_a_full_device_equals_the_simulation_to_the_bit(name: str, tmp_path: Path) -> None:
    data = ClientData(samples(11, 0), samples(3, 1), samples(6, 2))
    spec = MethodSpec(
        NOISY,
        InputSpec((1, 8, 8)),
        ["a", "b", "c"],
        MethodConfig(name, 1, 4, OptimiserConfig(lr=0.1)),
        seed=3,
    )
    reference, device = build_method(spec), worker(tmp_path, data)
    client = Client("pi-01", data, 3, 4, spec.seed)
    shared, own = steps.start(reference), steps.start_own(reference, "pi-01")
    for round in (1, 2):
        now = reference.at(round)
        down = steps.broadcast(now, shared, "pi-01")
        payload = pack(tree.to_arrays(down))
        update, own = client.train(now, round, down, own)
        torch.manual_seed(round)  # the device draws in between
        report = perform(device, assign("train", round, payload), spec, payload).report
        blob = device.store.blob(report.id)
        assert blob is not None and tree.same(tree.from_arrays(unpack(blob)), update.parts)
        shared = steps.aggregate(now, shared, steps.received(now, [update], {"pi-01": down}))
        measured = perform(device, assign("evaluate", round, payload, 9), spec, payload).report.metrics
        assert measured == client.evaluate(now, down, own)
    last = steps.broadcast(now, shared, "pi-01")
    closing, _ = client.personalise(now, 2, last, own)
    payload = pack(tree.to_arrays(last))
    assert perform(device, assign("personalise", 2, payload), spec, payload).report.metrics == closing.metrics


class Interrupt(RunHooks):
    """Ends a run after round 2, as Ctrl-C does."""

    def after_round(self, result: RoundResult, fleet: Clients) -> None:
        if result.round == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("name", METHODS_TRIED)
def test_a_resumed_run_equals_an_undisturbed_one_to_the_bit(name: str, tmp_path: Path) -> None:
    settings = ["data.clients=3", "data.fraction=0.1", "rounds=3", f"method.name={name}", "engine=sequential"]
    recipe = with_settings(Recipe(), [*settings, "model.name=tests.noisy:Noisy"])
    whole, _ = orchestrator.run(recipe, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        orchestrator.run(recipe, tmp_path / "stopped", hooks=Interrupt())
    (stopped,) = (tmp_path / "stopped").iterdir()
    torch.manual_seed(1)
    resumed, _ = orchestrator.run(recipe, tmp_path / "stopped", resume=stopped)
    one, other = (checkpoint.load(results.checkpoints) for results in (whole, resumed))
    assert tree.same(one.shared, other.shared)
    assert [line.clients for line in whole.rounds()] == [line.clients for line in resumed.rounds()]


def test_predictions_of_a_result_are_the_same_each_time() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(90) % 3
    images = rng.random((90, 8, 8)) / 4 + labels[:, None, None] / 4
    result = run(
        "fedrep",
        images,
        labels,
        clients=3,
        rounds=1,
        model="tests.noisy:Noisy",
        settings={"method.batch_size": 8},
    )
    data = result.trained.study.data()
    for client, accuracy in zip(result.clients, result.accuracy, strict=True):
        first, again = (result.predict(client, data[client].test.x) for _ in range(2))
        assert (first == again).all() and (first == data[client].test.y).mean() == accuracy


@pytest.mark.parametrize("name", sorted(METHODS))
def test_built_in_methods_on_built_in_models_are_not_seeded(name: str) -> None:
    at: ClientStore = store(name)
    assert not build_method(at.settings.spec).draws


def test_no_built_in_model_draws_and_dropout_is_found() -> None:
    spec = replace(store("fedavg").settings.spec, input=InputSpec((3, 32, 32)))
    for model in (name for name in MODELS if name not in ("cnn1d", "audio-cnn", "random-kernels")):
        assert not build_method(replace(spec, model=ModelConfig(model))).draws, model
    assert build_method(replace(spec, model=DROPPING)).draws
