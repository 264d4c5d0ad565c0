"""Fully connected networks of many clients, trained as stacks, end as each client's would alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from edge_fl.inputs import InputSpec
from edge_fl.learn import tree
from edge_fl.learn.batches import Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.network import stacks
from edge_fl.learn.network.chain import Chain
from edge_fl.learn.network.part import Part
from edge_fl.learn.network.precision import computing_in
from edge_fl.learn.objective import CrossEntropy
from edge_fl.learn.optimiser import Adam, Optimiser, Sgd
from edge_fl.learn.stacked import Stacked, stack
from edge_fl.learn.tree import Parts
from edge_fl.models.normalise import Normalised

INPUT, CLASSES, SIZES = InputSpec((1, 4, 4), (0.4,), (0.2,)), 3, (7, 12, 3)


class Hidden(Chain):
    """One hidden layer on pixels."""

    feature_dim = 6

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU())

    def layers(self) -> tuple[nn.Module, ...]:
        return (self.all,)


def network(**options: object) -> CrossEntropy:
    extractor = Part("extractor", lambda: Normalised(Hidden(), INPUT), 1)
    parts = {"extractor": extractor, "head": Part("head", lambda: nn.Linear(6, CLASSES), 2)}
    return CrossEntropy(parts, **options)  # type: ignore[arg-type]


def members() -> list[Batches]:
    drawn = torch.Generator().manual_seed(0)
    return [
        Batches.of(
            torch.randint(0, 256, (size, *INPUT.shape), generator=drawn, dtype=torch.uint8),
            torch.randint(0, CLASSES, (size,), generator=drawn),
            classes=CLASSES,
            batch_size=4,
            client=str(place),
        )
        for place, size in enumerate(SIZES)
    ]


def together(loss: CrossEntropy, params: Parts, optimiser: Optimiser) -> list[Parts]:
    """The parts of every client after two epochs under vmap; the second client starts from other values."""
    clients = members()
    x, y, real = stack(clients)

    def train(place: Tensor, x: Tensor, y: Tensor, real: Tensor, params: Parts) -> Parts:
        first = clients[0]
        data = Stacked(x, y, CLASSES, first.batch_size, members=tuple(clients), place=place, real=real)
        return fit(loss, params, data, stage="s", epochs=2, optimiser=optimiser)

    starts = tree.map(lambda t: torch.stack([scale * t for scale in (1.0, 0.5, 1.0)]), params)
    trained = torch.func.vmap(train)(torch.arange(len(clients)), x, y, real, starts)
    return [tree.map(lambda t, place=place: t[place], trained) for place in range(len(clients))]


def alone(loss: CrossEntropy, params: Parts, optimiser: Optimiser) -> list[Parts]:
    starts = [tree.map(lambda t, scale=scale: scale * t, params) for scale in (1.0, 0.5, 1.0)]
    settings = {"stage": "s", "epochs": 2, "optimiser": optimiser}
    return [fit(loss, start, data, **settings) for start, data in zip(starts, members(), strict=True)]  # type: ignore[arg-type]


def start(loss: CrossEntropy) -> Parts:
    return {name: part.init() for name, part in loss.parts.items()}


def apart(ours: list[Parts], theirs: list[Parts]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(
        float((t - tree.leaves(b)[path]).abs().max()) for a, b in pairs for path, t in tree.leaves(a).items()
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of layers of each call of `stacks.fit`."""
    seen: list[int] = []
    real = stacks.fit
    monkeypatch.setattr(stacks, "fit", lambda layers, *rest: seen.append(len(layers)) or real(layers, *rest))
    return seen


@pytest.mark.parametrize("optimiser", [Sgd(0.05), Sgd(0.05, momentum=0.9), Sgd(0.05, 0.01)], ids=str)
def test_stacks_train_every_client_as_alone(optimiser: Optimiser, calls: list[int]) -> None:
    loss = network()
    params = start(loss)
    assert apart(together(loss, params, optimiser), alone(loss, params, optimiser)) < 1e-6
    assert calls == [5], "pixels, flatten, hidden layer, activation, head"


def test_a_frozen_extractor_is_shared_by_all_clients(calls: list[int]) -> None:
    whole = network()
    params = start(whole)
    loss = replace(whole, frozen={"extractor": params["extractor"]})
    ours, theirs = (fn(loss, params["head"], Sgd(0.1)) for fn in (together, alone))  # type: ignore[arg-type]
    assert apart(ours, theirs) < 1e-6 and calls == [5]


def test_what_stacks_do_not_support_is_left_to_vmap(calls: list[int]) -> None:
    loss = network()
    params = start(loss)
    clipped, adaptive = Sgd(0.05, max_norm=0.1), Adam(0.01)
    towards = network(reference=params, pull=0.5)
    for each, optimiser in ((loss, clipped), (loss, adaptive), (towards, Sgd(0.05))):
        assert apart(together(each, params, optimiser), alone(each, params, optimiser)) < 1e-5
    with computing_in("bf16"):
        together(loss, params, Sgd(0.05))
    assert not calls
