"""Every engine gives the sequential engine's results: for every method, unusual clients, dying workers and full memory.

The toy federation has clients of different sizes, fewer samples than a batch, a single class, or two samples. Its network has BatchNorm;
FedCRL adds dropout, RepPer and DualFed augmentation.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from edge_fl.config import MethodConfig, MethodSpec, ModelConfig, OptimiserConfig
from edge_fl.data.partition import Split
from edge_fl.errors import RunError
from edge_fl.learn import tree
from edge_fl.learn.tree import Parts
from edge_fl.methods import METHODS, build_method, names
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl_server.recipes.recipe import CohortConfig
from edge_fl_server.training import rounds
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.engines import processes
from edge_fl_server.training.engines.pool import PoolClients
from edge_fl_server.training.engines.simulated import SequentialClients
from edge_fl_server.training.engines.vector import VectorClients
from edge_fl_server.training.rounds import Plan
from edge_fl_server.training.studies import ClientSettings, ClientStore
from tests.edge_fl.methods import toy

TOLERANCE = 1e-5  # between engines that add in another order
# a sharp contrast of small batches behind BatchNorm: rounding would grow in the reference itself
STEADIER: dict[str, dict[str, Any]] = {
    "dualfed": {"batch_size": 64, "options": {"temperature": 1.0}},
    "fedcgs": {
        "options": {"ridge": 1.0}
    },  # else the inverse of a covariance of few samples multiplies rounding errors
}
CANNOT_BE_VECTORISED = {"class-statistics", "fedala", "pfedfda"}  # what they do depends on values
CONVOLUTIONS = ModelConfig("cnn-tiny", {"feature_dim": 32, "width": 4})

Build = Callable[[ClientStore], Clients]
Leaves = dict[tuple[str, ...], torch.Tensor]
Metrics = Mapping[str, Mapping[str, float]]


pytestmark = pytest.mark.usefixtures("one_thread")


def store(
    name: str,
    model: ModelConfig = CONVOLUTIONS,
    precision: str = "fp32",
    momentum: float = 0.5,
    **options: Any,
) -> ClientStore:
    """The toy federation as the engines get it, under a method."""
    clients, input = toy.clients(), toy.INPUT if toy.kind == "picture" else toy.SERIES
    parts = [part for c in clients.values() for part in (c.data.train, c.data.validation, c.data.test)]
    rows = np.split(np.arange(sum(map(len, parts))), np.cumsum([len(part) for part in parts])[:-1])
    split = Split(
        sum(map(len, parts)), tuple(clients), tuple(rows[::3]), tuple(rows[1::3]), tuple(rows[2::3])
    )
    usual = MethodConfig(name, 1, 8, OptimiserConfig("sgd", 0.01, momentum=momentum), options)
    config = msgspec.structs.replace(usual, **STEADIER.get(name, {}))
    spec = MethodSpec(model, input, [str(label) for label in range(toy.CLASSES)], config, 3)
    x, y = np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts])
    return ClientStore(ClientSettings(spec, tuple(clients), precision), x, y, split)


def two_rounds(at: ClientStore, fleet: Clients) -> tuple[Method, Parts]:
    """With most clients in each: (method, shared parts)."""
    method = build_method(at.settings.spec)
    method.net.to(at.device)
    start = tree.to_device(steps.start(method), at.device)
    plan, shared = Plan(2, seed=3, cohort=CohortConfig(participation=0.8)), start
    for result in rounds.run(method, fleet, plan, start):
        shared = result.shared
    return method, shared


def trained(at: ClientStore, fleet: Clients) -> Leaves:
    """Shared and personal parts after two rounds."""
    _, shared = two_rounds(at, fleet)
    return tree.leaves({"shared": shared, "own": dict(fleet.personal_state())})


def outcome(at: ClientStore, build: Build) -> tuple[Leaves, Metrics]:
    """Shared and personal parts, and metrics, after two rounds and the final personalisation."""
    fleet = build(at)
    method, shared = two_rounds(at, fleet)
    shared, metrics = rounds.final_personalisation(method, fleet, shared, 2)
    return tree.leaves({"shared": shared, "own": dict(fleet.personal_state())}), metrics


def sequential(at: ClientStore) -> Clients:
    return SequentialClients(dict(at), build_method(at.settings.spec))


def vectorised(at: ClientStore) -> VectorClients:
    return VectorClients(dict(at), build_method(at.settings.spec), chunk=3)


def pooled(at: ClientStore) -> Clients:
    return PoolClients(at, workers=2)


@cache
def reference(name: str) -> tuple[Leaves, Metrics]:
    return outcome(store(name), sequential)


def difference(found: Leaves, expected: Leaves) -> float:
    """The largest between two trees, relative to the largest value of a tensor above 1; they must have the same names."""
    assert found.keys() == expected.keys()

    def of(t: torch.Tensor, other: torch.Tensor) -> float:
        return float((t.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1))

    return max((of(t, expected[path]) for path, t in found.items() if t.numel()), default=0.0)


@pytest.mark.parametrize("name", names())
def test_the_pool_equals_the_reference_to_the_bit(name: str) -> None:
    found, metrics = outcome(store(name), pooled)
    expected, expected_metrics = reference(name)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[path]) for path, tensor in found.items())
    assert metrics == expected_metrics


def test_the_pool_equals_the_reference_where_kernels_of_1x1_leave_the_order_of_channels_open() -> None:
    at = store("fedavg+ft", ModelConfig("mobilenet-v1"))
    (found, metrics), (expected, expected_metrics) = outcome(at, pooled), outcome(at, sequential)
    assert difference(found, expected) == 0 and metrics == expected_metrics


@pytest.mark.parametrize("name", names())
def test_the_vectorised_engine_equals_the_reference_to_rounding(name: str) -> None:
    at = store(name)
    fleet = vectorised(at)
    assert difference(trained(at, fleet), trained(at, sequential(at))) < TOLERANCE
    assert bool(fleet.fallback) == (name in CANNOT_BE_VECTORISED)


@pytest.mark.parametrize("name", ["fedavg", "fedrir", "repper"])
@pytest.mark.parametrize(
    "model", [ModelConfig("cnn1d", {"width": 4}), ModelConfig("random-kernels", {"feature_dim": 12})]
)
def test_engines_agree_on_a_series(name: str, model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy, "kind", "series")
    at = store(name, model)
    fleet, expected = vectorised(at), trained(at, sequential(at))
    assert not fleet.fallback and difference(trained(at, fleet), expected) < TOLERANCE


@pytest.mark.parametrize("norm", [True, False], ids=["autograd", "closed-form"])
def test_engines_agree_on_class_means_during_training(norm: bool) -> None:
    at = store("fedproto", ModelConfig("cnn-tiny", {"width": 4, "norm": norm}), means="during")
    expected = trained(at, sequential(at))
    assert float(expected["shared", "prototypes", "mean"].abs().max()) > 0.01
    assert difference(trained(at, vectorised(at)), expected) < TOLERANCE


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["fedavg", "fedrep"])
def test_engines_agree_on_a_network_with_closed_form_gradients(name: str, precision: str) -> None:
    at = store(name, ModelConfig("cnn-tiny", {"width": 4, "norm": False}), precision, momentum=0.0)
    method = build_method(at.settings.spec)
    assert method.net.extractor.chain and method.net.head.chain
    expected = trained(at, sequential(at))
    assert difference(trained(at, pooled(at)), expected) == 0
    assert difference(trained(at, vectorised(at)), expected) < (TOLERANCE if precision == "fp32" else 1e-2)


def test_a_method_that_cannot_be_vectorised_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert {name for name, method in METHODS.items() if not method.vectorises} == CANNOT_BE_VECTORISED
    vectorised(store("fedala"))
    assert "trained client by client: its local update depends on values" in caplog.text


def test_a_network_that_cannot_be_vectorised_is_trained_client_by_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    at = store("fedavg", ModelConfig("tests.server.networks:Asking"))
    assert difference(outcome(at, vectorised)[0], outcome(at, sequential)[0]) == 0
    assert "trained client by client" in caplog.text


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_results_do_not_depend_on_the_chunk_size(chunk: int) -> None:
    at = store("fedcrc")
    fleet = VectorClients(dict(at), build_method(at.settings.spec), chunk=chunk)
    assert difference(trained(at, fleet), trained(at, sequential(at))) < TOLERANCE


@pytest.mark.parametrize("kind", [SequentialClients, VectorClients])
def test_personal_parts_in_files_equal_those_in_memory(kind: Any, tmp_path: Path) -> None:
    in_memory = outcome(store("ditto"), lambda at: kind(at, build_method(at.settings.spec)))[0]
    in_files = outcome(store("ditto"), lambda at: kind(at, build_method(at.settings.spec), tmp_path))[0]
    assert difference(in_files, in_memory) == 0
    assert {path.stem for path in tmp_path.iterdir()} == set(toy.clients())


def test_updates_of_the_pool_are_processed_on_one_thread_and_the_others_restored() -> None:
    at = store("fedavg")
    method, fleet = build_method(at.settings.spec), pooled(at)
    downs = dict.fromkeys(fleet.ids(), steps.start(method))
    with processes.threads(2):
        updates = fleet.each("train", 1, method, downs)
        next(updates)
        assert torch.get_num_threads() == 1
        updates.close()  # type: ignore[attr-defined]
        assert torch.get_num_threads() == 2


def test_a_worker_that_dies_in_mid_round_changes_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "armed"
    at = store("ditto", ModelConfig("tests.server.networks:Deadly", {"marker": str(marker)}))
    undisturbed = outcome(at, sequential)[0]
    marker.touch()
    disturbed = outcome(at, pooled)[0]
    assert not marker.exists(), "no worker died"
    assert difference(disturbed, undisturbed) == 0


def test_a_client_that_kills_every_worker_ends_the_run(tmp_path: Path) -> None:
    marker = tmp_path / "armed"
    at = store("fedavg", ModelConfig("tests.server.networks:Deadly", {"marker": str(marker), "always": True}))
    marker.touch()
    with pytest.raises(
        RunError, match=r"round 1, client c\d: its worker died 3 times, at last it was ended by SIGKILL"
    ):
        outcome(at, pooled)
    marker.unlink()
    assert outcome(at, pooled)[0], "the pool was not restarted"


def test_a_chunk_that_does_not_fit_into_memory_is_halved() -> None:
    """In a process of its own, which may have 250 MB more than after its imports; 64 clients of 4 MB each need more."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.server.small_memory"],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "halved and equal"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("build", [sequential, vectorised])
def test_half_precision_trains_nearly_the_same_and_keeps_everything_in_float32(
    precision: str, build: Build
) -> None:
    at = store("fedcrl", precision=precision)
    found, metrics = outcome(at, build)
    assert 1e-6 < difference(found, reference("fedcrl")[0]) < 0.2
    assert all(t.dtype == reference("fedcrl")[0][path].dtype for path, t in found.items())
    assert metrics.keys() == reference("fedcrl")[1].keys()


def test_unseen_clients_do_not_train() -> None:
    at = store("fedavg")
    at = replace(at, settings=ClientSettings(at.settings.spec, ("c0", "c2")))
    for build in (sequential, vectorised, pooled):
        assert list(build(at).ids()) == ["c0", "c2"]
