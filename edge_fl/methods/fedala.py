"""FedALA: J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan, "FedALA: Adaptive Local Aggregation for Personalized Federated
Learning", AAAI 2023.

FedAvg with an additional step before local training: the client trains element-wise weights W that mix the received global head h^t with
its own head h_i from its last participation, on a share of its data and with all other layers frozen.

    ĥ = h_i + (h^t - h_i) ⊙ W                       Eq. 4
    W ← clip(W - η_W ∇_ĥ ℓ ⊙ (h^t - h_i), 0, 1)     Eq. 5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import fit, gradient, scan
from edge_fl.learn.network.part import history, personal
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract.hyper import hyper
from edge_fl.methods.contract.method import SHARED_MODEL, HeadTier, Method


@dataclass(frozen=True)
class FedALA(Method):
    """Shared model; personal are the head h_i after the last participation and the weights W in [0, 1]."""

    weights_lr: float = hyper(1.0, "η_W, learning rate of W", low=0, source="official code [C]")
    share: float = hyper(0.8, "share of the data for training W", low=0, high=1, source="s = 80 [P]")
    threshold: float = hyper(0.1, "first training of W ends when ten losses vary less", low=0, source="[C]")
    first_epochs: int = hyper(100, "limit of epochs of the first training of W", low=1, source="[D]")

    title: ClassVar = "FedALA"
    citation: ClassVar = "Zhang et al., AAAI 2023"
    family: ClassVar = "global model, mixed in per client"
    grid: ClassVar = {"weights_lr": (0.1, 1.0), "share": (0.2, 0.8)}
    has_global: ClassVar = True
    vectorises: ClassVar = False
    own: ClassVar = {"personal_head": personal(like="head"), "weights": personal()}
    parts: ClassVar = {**SHARED_MODEL, **own, "history": history(rounds=0)}
    head_tier: ClassVar = HeadTier(
        "adapted", "weights W, then the head", ("head",), way="mixed", numbers={"mixing": "weights_lr"}
    )

    def init_own(self, client: str) -> Parts:
        own = super().init_own(client)
        return {**own, "weights": tree.map(torch.ones_like, own["personal_head"])}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        weights = self._learn_weights(down, own, data)
        start = {**down, "head": mixed(weights, down["head"], own["personal_head"])}  # Eq. 4
        w = fit(self.loss, start, data, stage="train", epochs=self.epochs, optimiser=self.optimiser)
        history = {"rounds": own["history"]["rounds"] + 1}
        return w, {"personal_head": w["head"], "weights": weights, "history": history}

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        return {}, {**own, "weights": self._learn_weights(down, own, data)}

    def _learn_weights(self, down: Parts, own: Parts, data: Batches) -> Params:
        """W after one epoch; after epochs until the losses converge on the second participation; unchanged on the first."""
        received, previous, rate = down["head"], own["personal_head"], self.weights_lr
        z = data.sample(self.share, "s1").features(self.net.extractor, down["extractor"])

        def step(carry: tuple[Params, Tensor], batch: Batch) -> tuple[Params, Tensor]:
            head = mixed(carry[0], received, previous)
            grad = {path[0]: g for path, g in gradient(self.head_loss, head, batch).items()}
            steps = tree.map(lambda g, a, b: rate * g * (a - b), grad, received, previous)  # Eq. 5
            weights = tree.map(lambda w, s: (w - s).clamp(0, 1), carry[0], steps)
            return weights, self.head_loss(head, batch)

        carry, losses, rounds = (own["weights"], torch.zeros(())), [], int(own["history"]["rounds"])
        for epoch in range({0: 0, 1: self.first_epochs}.get(rounds, 1)):
            carry = scan(step, carry, z, stage=f"s1.{epoch}", epochs=1)
            losses.append(carry[1])
            if epoch >= 10 and float(torch.stack(losses[-10:]).std(correction=0)) < self.threshold:
                break
        return carry[0]

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        head = mixed(parts["weights"], parts["head"], parts["personal_head"])
        return self.classify({**parts, "head": head}, x)


def mixed(weights: Params, received: Params, previous: Params) -> Params:
    """weights * received + (1 - weights) * previous, element by element."""
    return tree.map(lambda w, a, b: w * a + (1 - w) * b, weights, received, previous)
