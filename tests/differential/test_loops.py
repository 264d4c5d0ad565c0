"""Whole runs of methods against loops in plain torch, written from the papers' algorithms: every parameter after every round.

The federation is that of the comparison with PFLlib, of which nothing is needed here.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edge_fl.learn.tree import Parts
from tests.differential.ours import RECIPE, Ours, Setting, tensors

EPOCHS, LR = RECIPE.method.epochs, RECIPE.method.optimiser.lr
Models = dict[str, list[Tensor]]
"""What a loop has after a round: parameters in a row [P], of the server or of each client."""


class Federation:
    """The start w [P] of a method's run, and the images x and labels y of each client."""

    def __init__(self, ours: Ours) -> None:
        parts = ours.method.net.parts
        self._module = nn.Sequential(parts["extractor"].build(), parts["head"].build())
        self._names = [[name for name, _ in part.named_parameters()] for part in self._module.children()]
        self.data = [tensors(data.train) for data in ours.data.values()]
        total = sum(len(y) for _, y in self.data)
        self.shares = [len(y) / total for _, y in self.data]
        self.start = self.row({name: parts[name].init() for name in ("extractor", "head")})

    def row(self, parts: Parts, prefix: str = "") -> Tensor:
        """The parameters of a model of ours, [P]."""
        model = [parts[prefix + name] for name in ("extractor", "head")]
        found = [part[name] for part, names in zip(model, self._names, strict=True) for name in names]
        return torch.cat([t.flatten() for t in found])

    def logits(self, w: Tensor, x: Tensor) -> Tensor:
        """[B, C] of the model w [P]."""
        held, place = {}, 0
        for name, t in self._module.named_parameters():
            held[name] = w[place : place + t.numel()].view(t.shape)
            place += t.numel()
        return torch.func.functional_call(self._module, held, (x,))

    def slope(self, w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Gradient [P] of the cross-entropy at w [P]."""
        return gradient(lambda at: F.cross_entropy(self.logits(at, x), y), w)

    def mean(self, models: list[Tensor]) -> Tensor:
        """Weighted by samples."""
        return torch.stack([share * w for share, w in zip(self.shares, models, strict=True)]).sum(0)


def gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    point = at.detach().requires_grad_()
    return torch.autograd.grad(loss(point), point)[0]


def scaffold(fed: Federation, server_lr: float) -> Iterator[Models]:
    """Algorithm 1, option II."""
    w, c = fed.start, torch.zeros_like(fed.start)
    own = [torch.zeros_like(w) for _ in fed.data]
    while True:
        local, changes = [], []
        for i, (x, y) in enumerate(fed.data):
            at = w
            for _ in range(EPOCHS):
                at = at - LR * (fed.slope(at, x, y) - own[i] + c)
            new = own[i] - c + (w - at) / (EPOCHS * LR)
            local.append(at - w)
            changes.append(new - own[i])
            own[i] = new
        w, c = w + server_lr * torch.stack(local).mean(0), c + torch.stack(changes).mean(0)
        yield {"": [w], "control_": [c], "own_control_": list(own)}


def feddyn(fed: Federation, alpha: float) -> Iterator[Models]:
    """Algorithm 1; h_i are the gradients that clients keep, h is the server's state."""
    w, h = fed.start, torch.zeros_like(fed.start)
    own = [torch.zeros_like(w) for _ in fed.data]
    while True:
        local = []
        for i, (x, y) in enumerate(fed.data):
            at = w
            for _ in range(EPOCHS):
                at = at - LR * (fed.slope(at, x, y) - own[i] + alpha * (at - w))
            own[i] = own[i] - alpha * (at - w)
            local.append(at)
        mean = torch.stack(local).mean(0)
        h = h - alpha * (mean - w)
        w = mean - h / alpha
        yield {"": [w], "drift_": [-h / alpha], "own_drift_": [-each / alpha for each in own]}


def fedntd(fed: Federation, beta: float, tau: float) -> Iterator[Models]:
    """Algorithm 1, with logits from which the label's is taken out."""
    w = fed.start
    while True:
        local = []
        for x, y in fed.data:
            at, teacher = w, fed.logits(w, x).detach()
            others = F.one_hot(y, teacher.shape[1]) == 0

            def loss(
                point: Tensor, x: Tensor = x, y: Tensor = y, t: Tensor = teacher, others: Tensor = others
            ) -> Tensor:
                s = fed.logits(point, x)
                s_other, t_other = (each[others].view(len(y), -1) / tau for each in (s, t))
                terms = F.kl_div(s_other.log_softmax(1), t_other.softmax(1), reduction="batchmean")
                return F.cross_entropy(s, y) + beta * tau**2 * terms

            for _ in range(EPOCHS):
                at = at - LR * gradient(loss, at)
            local.append(at)
        w = torch.stack(local).mean(0)
        yield {"": [w]}


def apfl(fed: Federation, alpha: float) -> Iterator[Models]:
    """Algorithm 1 with trained weights: w first, then v and its weight at the mixture with the new w."""
    w, own = fed.start, [fed.start for _ in fed.data]
    weights = [torch.tensor(alpha) for _ in fed.data]
    while True:
        local = []
        for i, (x, y) in enumerate(fed.data):
            at, v, weight = w, own[i], weights[i]
            for _ in range(EPOCHS):
                at = at - LR * fed.slope(at, x, y)
                slope = fed.slope(weight * v + (1 - weight) * at, x, y)
                v, weight = v - LR * weight * slope, weight - LR * slope @ (v - at)
                weight = weight.clip(0, 1)
            own[i], weights[i] = v, weight
            local.append(at)
        w = fed.mean(local)
        yield {"": [w], "personal_": list(own), "history": list(weights)}


LOOPS: Mapping[str, tuple[Callable[..., Iterator[Models]], dict[str, Any]]] = {
    "scaffold": (scaffold, {"server_lr": 0.8}),
    "feddyn": (feddyn, {"alpha": 0.1}),
    "fedntd": (fedntd, {"beta": 1.0, "tau": 2.0}),
    "apfl": (apfl, {"alpha": 0.6}),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_run_is_the_papers_algorithm(name: str) -> None:
    loop, options = LOOPS[name]
    ours = Ours(Setting(name, options, smooth=True))
    fed = Federation(ours)
    rounds = zip(ours.rounds(), loop(fed, **options), strict=False)
    for number, ((shared, own), expected) in enumerate(rounds, 1):
        for prefix, models in expected.items():
            if prefix == "history":
                found = [each["history"]["alpha"] for each in own.values()]
            else:
                everyone = [shared] if len(models) == 1 else own.values()
                found = [fed.row(parts, prefix) for parts in everyone]
            worst = max(float((a - b).abs().max()) for a, b in zip(found, models, strict=True))
            assert worst < 5e-6, (number, prefix, worst)
    assert number == RECIPE.rounds
    assert float((fed.row(shared) - fed.start).abs().max()) > 0.01
