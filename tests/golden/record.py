"""Golden numbers: results of three rounds of each method on a few digits, on one CPU thread with a fixed seed.

They are compared with a tolerance of 1e-4 and not bit by bit, so that they hold for torch 2.11 to 2.15 on any processor: kernels sum in
different orders. After an intended change of a method, record them again with `python -m tests.golden`.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from edge_fl.config import MethodConfig, ModelConfig, OptimiserConfig
from edge_fl.data.partition import DataConfig
from edge_fl.learn import tree
from edge_fl.learn.tree import Parts
from edge_fl.methods import find
from edge_fl_server.orchestrate.execution import simulate
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.training import studies
from edge_fl_server.training.clients import Clients
from edge_fl_server.training.rounds import FinalResult, RunHooks

FOLDER = Path(__file__).parent
TOLERANCE = 1e-4
ACCURACY_TOLERANCE = 0.02  # of a mean over clients: one or two images near the decision boundary
RECIPE = Recipe(
    name="golden",
    seed=11,
    rounds=3,
    evaluate_every=0,
    device="cpu",
    engine="sequential",
    data=DataConfig(dataset="digits", clients=4, beta=0.5, fraction=0.25, validation_fraction=0.0),
    model=ModelConfig("cnn-tiny", {"feature_dim": 16, "width": 8}),
)
OPTIMISER = OptimiserConfig("sgd", lr=0.05, momentum=0.5)
# Options that are not the defaults: for less rounding error, or the defaults at the time of the recording.
SETTINGS: dict[str, dict[str, Any]] = {
    "dualfed": {
        "batch_size": 256,
        "optimiser": OptimiserConfig("sgd", 0.01),
        "options": {"contrast": 1.0, "temperature": 0.2},
    },
    "fedamp": {"options": {"lam": 1.0, "alpha": 1e4, "sigma": 1e6, "distances": "absolute"}},
    "fedavg+ft": {"options": {"ft_lr": 0.01, "ft_steps": 0}},
    "fedcrc": {"options": {"refresh_personal": False}},
    "fedgh": {"optimiser": OptimiserConfig("sgd", 0.01)},
    "fedkd": {"options": {"rounds": 100, "detach_weight": False}},
    "fedprox+ft": {"options": {"ft_lr": 0.01, "ft_steps": 0}},
    "fedrir": {"options": {"kld_weight": 0.1, "id_weight": 1.0}},
    "moon": {"options": {"moon_proj": 0}},
    "pfedme": {"options": {"inner_lr": 0.09}},
    "repper": {"options": {"head": "logistic", "augment": "supcon"}},
}
SALTED = {  # personal networks that were drawn per client when the numbers were recorded; today they start equal
    "dualfed": ("projector",),
    "fedrir": ("specific_extractor", "decoder", "estimator", "head"),
}

Numbers = dict[str, Any]


def record(name: str) -> Numbers:
    """{"accuracy": {metric: mean}, "shared": {part: [length, along]}, "personal": likewise} of a method."""
    found: Numbers = {}

    class Digests(RunHooks):
        def after_final(self, result: FinalResult, fleet: Clients) -> None:
            found["shared"] = digest([result.shared])
            found["personal"] = digest([own for _, own in fleet.personal_state()])

    usual = MethodConfig(name, epochs=1, batch_size=16, optimiser=OPTIMISER)
    config = msgspec.structs.replace(usual, **SETTINGS.get(name, {}))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with drawn_per_client(name):
            outcome = simulate(studies.prepare(RECIPE).with_method(config), Digests())
    finally:
        torch.set_num_threads(threads)
    means = {metric: round(summary.mean, 4) for metric, summary in outcome.last().items() if "acc" in metric}
    return {"accuracy": dict(sorted(means.items())), **found}


@contextmanager
def drawn_per_client(name: str) -> Iterator[None]:
    """Draw the networks in SALTED anew for every client."""
    method, parts = find(name), find(name).parts
    method.parts = {  # type: ignore[misc]
        part: replace(spec, salted=True) if part in SALTED.get(name, ()) else spec
        for part, spec in parts.items()
    }
    yield
    method.parts = parts  # type: ignore[misc]


def digest(owners: Iterable[Parts]) -> dict[str, list[float]]:
    """Per part, floats only, over all owners: its norm, and its projection on a fixed direction, which detects permutations."""
    lengths: dict[str, torch.Tensor] = {}
    along: dict[str, torch.Tensor] = {}
    for parts in owners:
        for name, params in parts.items():
            for path, tensor in sorted(tree.leaves(params).items()):
                if not tensor.is_floating_point():
                    continue
                values = tensor.detach().to(torch.float64).flatten()
                direction = torch.cos(torch.arange(len(values), dtype=torch.float64) + len(path[-1]))
                lengths[name] = lengths.get(name, torch.zeros(())) + (values**2).sum()
                along[name] = along.get(name, torch.zeros(())) + values @ direction
    return {
        name: [round(float(lengths[name].sqrt()), 6), round(float(along[name]), 6)]
        for name in sorted(lengths)
    }


def path_of(name: str) -> Path:
    """The file of a method's numbers."""
    return FOLDER / f"{name}.json"


def write(name: str) -> None:
    """Record a method and write its numbers."""
    path_of(name).write_text(json.dumps(record(name), indent=1) + "\n")


def read(name: str) -> Numbers:
    """A method's recorded numbers."""
    numbers: Numbers = json.loads(path_of(name).read_text())
    return numbers
