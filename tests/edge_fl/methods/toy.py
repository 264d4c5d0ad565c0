"""A federation small enough for a unit test: digits, five clients of ragged sizes, one with a single class, one with two samples.

The digits are pictures, or with `kind` = "series" windows: rows as channels, columns as time.

`federate` runs any method on it as the engines do, through `methods.steps`, and keeps every broadcast and every update for the
tests to look at.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edge_fl.config import ModelConfig
from edge_fl.data.samples import ClientData, Samples
from edge_fl.inputs import InputSpec
from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.batches import Batches
from edge_fl.learn.network.part import Net, Part
from edge_fl.learn.optimiser import Optimiser, Sgd
from edge_fl.learn.pictures import pixels
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods import build
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.client import Client
from edge_fl.methods.contract.method import Method
from edge_fl.models import build_net

INPUT = InputSpec((1, 8, 8), (0.3,), (0.4,))
SERIES = InputSpec((8, 8), (0.3,), (0.4,), "CT", "float32", rate=8, hop=8)
kind = "picture"
"""Of the samples; a test may change it."""
CLASSES = 10
SINGLE, PAIR = "c2", "c3"  # the client that knows one class, and the one that has two samples


class Flat(nn.Module):
    """The smallest extractor: one linear layer on the pixels, no BatchNorm."""

    def __init__(self, input: InputSpec, feature_dim: int = 12) -> None:
        super().__init__()
        self.linear = nn.Linear(int(np.prod(input.shape)), feature_dim)
        self.feature_dim = feature_dim

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1))


def net(seed: int = 0, *, norm: bool = True) -> Net:
    """Two or three tiny convolutions with BatchNorm (or without), 12 features, 10 classes."""
    if kind == "series":
        return build_net(
            ModelConfig("cnn1d", {"feature_dim": 12, "width": 8, "norm": norm}), SERIES, CLASSES, seed
        )
    return build_net(
        ModelConfig("cnn-tiny", {"feature_dim": 12, "width": 4, "norm": norm}), INPUT, CLASSES, seed
    )


def flat_net(seed: int = 0) -> Net:
    """`Flat`, 12 features, 10 classes."""
    return build_net(ModelConfig("tests.edge_fl.methods.toy:Flat"), INPUT, CLASSES, seed)


def method(
    name: str,
    on: Net | None = None,
    *,
    epochs: int = 1,
    optimiser: Optimiser = Sgd(0.05, momentum=0.5),
    **options: Any,
) -> Method:
    """A method by name on `net()`, or on the given one."""
    return build(name, net() if on is None else on, epochs=epochs, optimiser=optimiser, **options)


def clients(batch_size: int = 8, run: int = 3) -> dict[str, Client]:
    """The five clients by id, ascending."""
    return _clients(batch_size, run, kind)


@cache
def _clients(batch_size: int, run: int, kind: str) -> dict[str, Client]:
    from sklearn.datasets import load_digits

    found = load_digits()
    x = np.rint(found.images * 15.9375).astype(np.uint8)[:, None]
    if kind == "series":
        x = x[:, 0].astype(np.float32) / 255
    samples = Samples(x, found.target.astype(np.int64))
    everything = np.arange(len(samples))
    low, high = everything[samples.y < 5], everything[samples.y >= 5]
    seven = everything[samples.y == 7]
    train = [everything[:37], low[30:51], seven[10:19], everything[[400, 401]], high[40:70]]
    test = [everything[1000:1020], low[300:312], seven[60:66], everything[[402, 403]], high[300:312]]
    return {
        f"c{i}": Client(f"c{i}", ClientData(*map(samples.take, (a, b, b))), CLASSES, batch_size, run)
        for i, (a, b) in enumerate(zip(train, test, strict=True))
    }


def batches(client: str = "c0", round: int = 1, batch_size: int = 8) -> Batches:
    """A client's training data as drawn in a round."""
    return clients(batch_size)[client].batches(round)


@dataclass
class Federation:
    """What happened: shared parts after every round (index 0 before the first), everything that travelled, and the personal parts."""

    method: Method
    clients: dict[str, Client]
    history: list[Parts]
    own: dict[str, Parts]
    downs: list[dict[str, Parts]] = field(default_factory=list)
    updates: list[dict[str, Update]] = field(default_factory=list)

    @property
    def shared(self) -> Parts:
        return self.history[-1]

    def images(self, client: str) -> Tensor:
        """A client's test images, float32 in 0..1."""
        return pixels(torch.from_numpy(self.clients[client].data.test.x))

    def predict(self, client: str) -> Tensor:
        """Personalised logits of a client's test images with the present broadcast."""
        down = steps.broadcast(self.method, self.shared, client)
        return steps.predict(self.method, down, self.own[client], self.images(client))


def federate(
    method: Method,
    rounds: int = 2,
    *,
    cohort: Callable[[int], Iterable[str]] = lambda round: clients(),
    data: dict[str, Client] | None = None,
) -> Federation:
    """`rounds` rounds in ascending client id; `cohort` says who takes part in which."""
    data = clients() if data is None else data
    run = Federation(method, data, [steps.start(method)], {id: steps.start_own(method, id) for id in data})
    for number in range(1, rounds + 1):
        now, asked = method.at(number), sorted(cohort(number))
        run.downs.append({id: steps.broadcast(now, run.shared, id) for id in asked})
        run.updates.append({})
        for id in asked:
            run.updates[-1][id], run.own[id] = data[id].train(now, number, run.downs[-1][id], run.own[id])
        run.history.append(steps.aggregate(now, run.shared, run.updates[-1].values()))
    return run


def module_of(part: Part, params: Params) -> nn.Module:
    """A part as a plain torch module in training mode, for loops to compare with."""
    module = copy.deepcopy(part.build())
    module.load_state_dict({name.removeprefix(tree.BUFFER): t.clone() for name, t in params.items()})
    return module.train()


def same_as(params: Params, module: nn.Module, atol: float = 1e-6) -> bool:
    """Whether params equal a module's up to rounding."""
    state = module.state_dict()
    return all(
        torch.allclose(t, state[name.removeprefix(tree.BUFFER)], atol=atol) for name, t in params.items()
    )


def train(method: Method, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
    """One local update -> (parts to send, the client's personal parts)."""
    return steps.sent(method, "train", down, *steps.trained(method, down, own, data), data)


def count(tree_: Any) -> int:
    """Number of values in a tree."""
    return sum(t.numel() for t in tree.leaves(tree_).values())
