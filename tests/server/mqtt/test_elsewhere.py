"""Training on a device that is not the CPU, for every method: no tensor stays on the CPU, and results equal the CPU's.

Of the real thing only the placement is seen (`tests.server.mqtt.elsewhere`); `make bench-gpu` compares engines on a real GPU.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec.structs import replace as with_fields

from edge_fl.learn import tree
from edge_fl.methods import names
from edge_fl_server.orchestrate.execution import RunResult, simulate
from edge_fl_server.recipes.recipe import Recipe, with_settings
from edge_fl_server.training import studies
from tests.sample import sample
from tests.server.mqtt.elsewhere import ELSEWHERE, There, elsewhere, held
from tests.server.training.engines.test_engines import Build, outcome, sequential, store, vectorised

TINY = with_settings(
    Recipe(name="tiny"),
    [
        "data.clients=4",
        "data.fraction=0.2",
        "data.unseen=1",
        "rounds=2",
        "evaluate_every=1",
        "model.options={feature_dim=8, width=4}",
    ],
)
CLOSE = 0.02  # the layout of images in memory, and with it rounding, is a device's own


def run(device: str, *settings: str) -> RunResult:
    recipe = with_settings(TINY, list(settings))
    return simulate(studies.prepare(with_fields(recipe, device=device)))


def cases() -> Iterator[Any]:
    """FedCRC on both engines in the fast group; every other method on one of them in CI, on both nightly."""
    for number, name in enumerate(names()):
        for place, build in enumerate((sequential, vectorised)):
            in_ci = number % 2 == place
            later = [pytest.mark.slow] if in_ci else [pytest.mark.slow, pytest.mark.nightly]
            marks = [] if name == "fedcrc" else later
            yield pytest.param(name, build, marks=marks, id=f"{name}-{build.__name__}")


@pytest.mark.parametrize(("name", "build"), list(cases()))
def test_every_method_trains_elsewhere(name: str, build: Build) -> None:
    at = store(name)
    with elsewhere():
        found, metrics = outcome(replace(at, device=ELSEWHERE), build)
    expected, expected_metrics = outcome(at, build)
    assert found.keys() == expected.keys() and metrics.keys() == expected_metrics.keys()
    for path, tensor in found.items():
        assert held(tensor).shape == expected[path].shape and held(tensor).isfinite().all()
    shared = [path for path in found if path[0] == "shared"]
    assert all(isinstance(found[path], There) for path in shared)
    assert all(torch.allclose(held(found[path]), expected[path], atol=CLOSE) for path in shared)


SETTINGS_IN_CI = [
    "engine=vector",
    "method.name=fedproto",
    "method.optimiser.name=adam",
    "compression.kind=topk",
    "privacy.clip=1.0 privacy.noise_multiplier=0.5 model.options={width=4,norm=false}",
    "cohort.buffer_size=2",
    "validation.centre=median",
]
SETTINGS_LATER = [
    "engine=auto",
    "method.name=fedbabu",
    "compression.kind=int8",
    "validation.clip=1.0",
    "model.name=resnet18 model.options={}",
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", sample([*SETTINGS_IN_CI, *SETTINGS_LATER], SETTINGS_IN_CI))
def test_whole_runs_give_the_same_results_on_another_device(settings: str) -> None:
    with elsewhere():
        found = run(ELSEWHERE, *settings.split())
    here = run("cpu", *settings.split())
    assert found.last().keys() == here.last().keys()
    assert all(isinstance(tensor, There) for tensor in tree.leaves(found.shared).values())


def test_a_tensor_left_on_the_cpu_is_detected() -> None:
    with elsewhere():
        there, here = torch.ones(3, device=ELSEWHERE), torch.ones(3)
        assert (there + there).sum().item() == 6 and torch.equal((2 * there).cpu(), 2 * here)
        with pytest.raises(RuntimeError, match=r"tensors of shape \[\(3,\)\] are on the CPU"):
            there + here
        there.add_(1)
        assert there.tolist() == [2.0] * 3
