"""The optimisers equal torch's, with clipping and weight decay."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from edge_fl.config import OptimiserConfig
from edge_fl.learn.optimiser import Adam, Optimiser, Sgd, optimiser

Torchs = Callable[[list[Tensor]], torch.optim.Optimizer]
PAIRS: dict[str, tuple[Optimiser, Torchs]] = {
    "sgd": (Sgd(0.1), lambda w: torch.optim.SGD(w, 0.1)),
    "momentum": (Sgd(0.1, 0.01, momentum=0.9), lambda w: torch.optim.SGD(w, 0.1, 0.9, weight_decay=0.01)),
    "adam": (Adam(0.01, 0.02), lambda w: torch.optim.Adam(w, 0.01, weight_decay=0.02)),
    "clipped": (
        Sgd(0.1, 0.01, momentum=0.9, max_norm=0.5),
        lambda w: torch.optim.SGD(w, 0.1, 0.9, weight_decay=0.01),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_steps_are_torchs(name: str) -> None:
    ours, make = PAIRS[name]
    draw = torch.Generator().manual_seed(1)
    start = {("a",): torch.randn(4, 3, generator=draw), ("b",): torch.randn(3, generator=draw)}
    theirs = [t.clone().requires_grad_() for t in start.values()]
    optimiser, params, state = make(theirs), dict(start), ours.init(start)
    for scale in (5.0, 1.0, 0.01):
        grads = {path: scale * torch.randn(t.shape, generator=draw) for path, t in start.items()}
        for parameter, gradient in zip(theirs, grads.values(), strict=True):
            parameter.grad = gradient.clone()
        if ours.max_norm:
            torch.nn.utils.clip_grad_norm_(theirs, ours.max_norm)
        optimiser.step()
        params, state = ours.step(params, grads, state)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(params.values(), theirs, strict=True))


def test_clipping_leaves_a_tiny_gradient_as_it_is() -> None:
    w = {("a",): torch.zeros(1)}
    moved, _ = Sgd(1.0, max_norm=0.5).step(w, {("a",): torch.tensor([5e-7])}, {})
    assert moved[("a",)].item() == pytest.approx(-5e-7)


def test_a_recipe_s_settings_reach_the_optimiser() -> None:
    steps = [[50, 0.2]]
    sgd = optimiser(OptimiserConfig("sgd", 0.1, momentum=0.9, weight_decay=0.01, lr_steps=steps))
    assert sgd == Sgd(lr=0.1, momentum=0.9, weight_decay=0.01, lr_steps=((50, 0.2),), max_norm=0.0)
    adam = optimiser(OptimiserConfig("adam", 0.1, weight_decay=0.01, lr_steps=steps))
    assert adam == Adam(lr=0.1, weight_decay=0.01, lr_steps=((50, 0.2),), max_norm=0.0)


def test_the_learning_rate_follows_its_steps() -> None:
    schedule = Sgd(0.05, lr_steps=((50, 0.2), (75, 0.02)))
    assert [schedule.at(round).lr for round in (1, 49, 50, 74, 75, 100)] == pytest.approx(
        [0.05, 0.05, 0.01, 0.01, 0.001, 0.001]
    )
