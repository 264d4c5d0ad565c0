"""FedALA: FedAvg in which each client learns, value by value, how much of the received model to mix into its own before it trains.

The client trains element-wise weights W that mix the received values h^t of the last p layers with its own ones h_i from its last
participation, on a share of its data and with all other layers frozen.

    ĥ = h_i + (h^t - h_i) ⊙ W                       Eq. 4
    W ← clip(W - η_W ∇_ĥ ℓ ⊙ (h^t - h_i), 0, 1)     Eq. 5

Source: J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan, "FedALA: Adaptive Local Aggregation for Personalized Federated
Learning", AAAI 2023.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import gradient, scan
from edge_fl.learn.losses import cross_entropy
from edge_fl.learn.network.part import history, personal
from edge_fl.learn.tree import BUFFER, Parts
from edge_fl.methods.contract.method import PERSONAL, SHARED_MODEL, HeadTier, Method, hyper

T = TypeVar("T")
WEIGHTS = {"head": "weights", "extractor": "extractor_weights"}  # the personal part of W for each mixed part


@dataclass(frozen=True)
class FedALA(Method):
    """Shared model; personal are the last p layers h_i after the last participation and their weights W in [0, 1]."""

    weights_lr: float = hyper(1.0, "η_W, learning rate of W", low=0, source="official code [C]")
    share: float = hyper(0.8, "share of the data for training W", low=0, high=1, source="s = 80 [P]")
    threshold: float = hyper(0.1, "first training of W ends when ten losses vary less", low=0, source="[C]")
    first_epochs: int = hyper(100, "limit of epochs of the first training of W", low=1, source="[D]")
    layers: int = hyper(1, "p, mixed layers, from the last; 1: the head", low=1, source="1 [C]")

    title = "FedALA"
    citation = "Zhang et al., AAAI 2023"
    family = "global model, mixed in per client"
    grid = {"weights_lr": (0.1, 1.0), "share": (0.2, 0.8)}
    has_global = True
    vectorises = False
    own = {"personal_head": personal(like="head"), "weights": personal()}
    parts = {**SHARED_MODEL, **own, "history": history(rounds=0)}
    head_tier = HeadTier(
        "adapted", "weights W, then the head", ("head",), way="mixed", numbers={"mixing": "weights_lr"}
    )

    def __post_init__(self) -> None:
        if self.layers > 1:
            more = {"personal_extractor": personal(like="extractor"), WEIGHTS["extractor"]: personal()}
            object.__setattr__(self, "parts", {**type(self).parts, **more})
        super().__post_init__()

    def init_own(self, client: str) -> Parts:
        top = self._top({name: self.net.parts[name].init() for name in SHARED_MODEL})
        weights = {WEIGHTS[name]: tree.map(torch.ones_like, params) for name, params in top.items()}
        return {**super().init_own(client), **tree.prefixed(PERSONAL, top), **weights}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        weights = self._learn_weights(down, own, data)
        start = self._mixed(down, {**own, **weights})  # Eq. 4
        w = self.train(self.loss, start, data)
        history = {"rounds": own["history"]["rounds"] + 1}
        return w, {**tree.prefixed(PERSONAL, self._top(w)), **weights, "history": history}

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        return {}, {**own, **self._learn_weights(down, own, data)}

    def _learn_weights(self, down: Parts, own: Parts, data: Batches) -> Parts:
        """W after one epoch; after epochs until the losses converge on the second participation; unchanged on the first."""
        received, previous, rate = self._top(down), tree.unprefixed(PERSONAL, own), self.weights_lr
        z, start = data.sample(self.share, "s1"), {name: own[WEIGHTS[name]] for name in received}
        if received.keys() == {"head"}:  # on features, which are computed once
            z = z.features(self.net.extractor, down["extractor"])

        def step(carry: tuple[Parts, Tensor], batch: Batch) -> tuple[Parts, Tensor]:
            top = mixed(carry[0], received, previous)
            error, grad = self._slope(down, top, batch)
            steps = tree.map(lambda g, a, b: rate * g * (a - b), grad, received, previous)  # Eq. 5
            weights = tree.map(lambda w, s: (w - s).clamp(0, 1), carry[0], steps)
            return weights, error

        carry, losses, rounds = (start, torch.zeros(())), [], int(own["history"]["rounds"])
        for epoch in range({0: 0, 1: self.first_epochs}.get(rounds, 1)):
            carry = scan(step, carry, z, stage=f"s1.{epoch}", epochs=1)
            losses.append(carry[1])
            if epoch >= 10 and float(torch.stack(losses[-10:]).std(correction=0)) < self.threshold:
                break
        return {WEIGHTS[name]: params for name, params in carry[0].items()}

    def _slope(self, down: Parts, top: Parts, batch: Batch) -> tuple[Tensor, Parts]:
        """The loss of a batch (of features, where only the head is mixed) and its gradient in the mixed layers."""
        if top.keys() == {"head"}:
            grad = gradient(self.head_loss, top["head"], batch)
            return self.head_loss(top["head"], batch), {"head": tree.replaced(top["head"], grad)}

        def loss(top: Parts, batch: Batch) -> Tensor:
            return cross_entropy(self.classify(tree.merge(down, top), batch.x), batch.y, batch.mask)

        return loss(top, batch), tree.replaced(top, gradient(loss, top, batch))

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        return self.classify(self._mixed(parts, parts), x)

    def _top(self, parts: Parts) -> Parts:
        """The parameters of the last p layers; BatchNorm statistics are those received."""
        top = {"head": parts["head"]}
        if names := self.net.top(self.layers).get("extractor"):
            kept = {key: t for key, t in parts["extractor"].items() if key in names and BUFFER not in key}
            top["extractor"] = kept
        return top

    def _mixed(self, down: Parts, own: Parts) -> Parts:
        """The received model with the mixture of its last p layers (Eq. 4)."""
        received, previous = self._top(down), tree.unprefixed(PERSONAL, own)
        weights = {name: own[WEIGHTS[name]] for name in received}
        return tree.merge({name: down[name] for name in SHARED_MODEL}, mixed(weights, received, previous))


def mixed(weights: T, received: T, previous: T) -> T:
    """weights * received + (1 - weights) * previous, element by element."""
    return tree.map(lambda w, a, b: w * a + (1 - w) * b, weights, received, previous)
