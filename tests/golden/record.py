"""Golden numbers: results of three rounds of each method on a few digits, on one CPU thread with a fixed seed.

They are compared with a tolerance of 1e-4 and not bit by bit, so that they hold for torch 2.11 to 2.15 on any processor: kernels sum in
different orders. After an intended change of a method, record them again with `python -m tests.golden`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch

from edge_fl.config import DataConfig, MethodConfig, ModelConfig, OptimiserConfig, Recipe
from edge_fl.learn import tree
from edge_fl.learn.tree import Parts
from server.orchestrate.execute import simulate
from server.training import study as studies
from server.training.fleet import Fleet
from server.training.rounds import FinalResult, RunHooks

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
STEADIER: dict[
    str, dict[str, Any]
] = {  # settings for methods whose rounding errors would exceed the tolerance
    "dualfed": {"batch_size": 256, "optimiser": OptimiserConfig("sgd", 0.01), "options": {"contrast": 1.0}},
    "fedgh": {"optimiser": OptimiserConfig("sgd", 0.01)},
    "repper": {"options": {"head": "logistic"}},
}

Numbers = dict[str, Any]


def record(name: str) -> Numbers:
    """{"accuracy": {metric: mean}, "shared": {part: [length, along]}, "personal": likewise} of a method."""
    found: Numbers = {}

    class Digests(RunHooks):
        def after_final(self, result: FinalResult, fleet: Fleet) -> None:
            found["shared"] = digest([result.shared])
            found["personal"] = digest([own for _, own in fleet.personal_state()])

    usual = MethodConfig(name, epochs=1, batch_size=16, optimiser=OPTIMISER)
    config = msgspec.structs.replace(usual, **STEADIER.get(name, {}))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        outcome = simulate(studies.prepare(RECIPE).with_method(config), Digests())
    finally:
        torch.set_num_threads(threads)
    means = {metric: round(summary.mean, 4) for metric, summary in outcome.last().items() if "acc" in metric}
    return {"accuracy": dict(sorted(means.items())), **found}


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
