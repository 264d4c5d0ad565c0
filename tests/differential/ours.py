"""edge-fl's side: the product's round loop on the sequential engine."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from edge_fl.config import MethodConfig, ModelConfig, OptimiserConfig
from edge_fl.data.partition import DataConfig
from edge_fl.data.samples import ClientData, Samples
from edge_fl.learn.batches import Batches, as_tensor
from edge_fl.learn.pictures import pixels
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl_server.orchestrate import execution
from edge_fl_server.orchestrate.execution import simulated_clients
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.training import rounds, studies
from edge_fl_server.training.rounds import Plan

Hits = list[Tensor]
"""For each round: whether each test image is predicted correctly, bool [images], all clients in order."""

RECIPE = Recipe(
    name="pfllib",
    seed=5,
    rounds=5,
    evaluate_every=0,
    device="cpu",
    engine="sequential",
    data=DataConfig(dataset="digits", clients=6, beta=0.5, fraction=0.4, validation_fraction=0.0),
    model=ModelConfig("tests.differential.network:TwoConvolutions"),
    method=MethodConfig("fedavg", epochs=2, batch_size=10_000, optimiser=OptimiserConfig("sgd", lr=0.1)),
)
"""One batch per client and epoch, so that the order of samples does not matter."""


@dataclass(frozen=True)
class Setting:
    """A method and its options.

    norm, smooth: the network's options. personalises: clients predict after final personalisation.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = RECIPE.method.epochs
    norm: bool = False
    smooth: bool = False
    personalises: bool = False


class Ours:
    """A method on the comparison's data: initial values, and what its clients predict after each round."""

    def __init__(self, setting: Setting) -> None:
        replace = msgspec.structs.replace
        config = replace(
            RECIPE.method, name=setting.method, epochs=setting.epochs, options=dict(setting.options)
        )
        model = replace(RECIPE.model, options={"norm": setting.norm, "smooth": setting.smooth})
        self.study = studies.prepare(replace(RECIPE, method=config, model=model))
        self._setup = execution.of_study(self.study)
        self._personalises = setting.personalises

    @property
    def method(self) -> Method:
        return self._setup.method

    @property
    def data(self) -> Mapping[str, ClientData]:
        return self.study.data()

    @property
    def classes(self) -> int:
        return len(self.study.dataset.classes)

    def initial(self, client: str) -> Parts:
        """All parts of a client before round 1."""
        shared = steps.broadcast(self.method, steps.start(self.method), client)
        return {**shared, **steps.start_own(self.method, client)}

    def rounds(self) -> Iterator[tuple[Parts, dict[str, Parts]]]:
        """The server's parts and each client's personal ones after every round."""
        fleet = simulated_clients(self._setup)
        for result in rounds.run(self.method, fleet, Plan.of(RECIPE, self.method)):
            yield result.shared, dict(fleet.personal_state())

    def hits(self) -> Hits:
        found = []
        for shared, own in self.rounds():
            each = [self._hits(id, data, shared, own[id]) for id, data in self.data.items()]
            found.append(torch.cat(each))
        return found

    def _hits(self, client: str, data: ClientData, shared: Parts, own: Parts) -> Tensor:
        down = steps.broadcast(self.method, shared, client)
        if self._personalises:
            x, y = tensors(data.train)
            train = Batches(x, y, self.classes, RECIPE.method.batch_size, client=client)
            _, own = steps.personalise(self.method, down, own, train)
        x, y = tensors(data.test)
        with torch.no_grad():
            return steps.predict(self.method, down, own, x).argmax(1) == y


def tensors(samples: Samples) -> tuple[Tensor, Tensor]:
    """Pixels [N, C, H, W] in 0..1 and labels [N]."""
    return pixels(as_tensor(samples.x)).contiguous(), as_tensor(samples.y).to(torch.int64)
