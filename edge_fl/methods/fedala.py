"""FedALA: J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan, "FedALA: Adaptive Local Aggregation for Personalized Federated
Learning", AAAI 2023. Before it trains, a client learns element by element how far its own head should go to the global one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import fit, gradient, settle
from edge_fl.learn.part import personal, shared
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.hyper import hyper
from edge_fl.methods.method import HeadTier, Method


def mixed(theirs: Params, ours: Params, weights: Params) -> Params:
    """W theirs + (1 - W) ours, element by element (Eq. 4)."""
    return tree.map(lambda a, b, w: w * a + (1 - w) * b, theirs, ours, weights)


@dataclass(frozen=True)
class FedALA(Method):
    """Shared model; personal are the head after the last participation, the weights W in [0, 1], and how often it took part."""

    weights_lr: float = hyper(1.0, "η_W, learning rate of W", low=0, source="official code [C]")
    share: float = hyper(0.8, "share of the data that W is learnt on", low=0, high=1, source="s = 80 [P]")
    threshold: float = hyper(0.1, "first learning ends when ten losses spread less", low=0, source="[C]")
    first_epochs: int = hyper(100, "epochs of the first learning of W at most", low=1, source="[D]")

    title: ClassVar = "FedALA"
    citation: ClassVar = "Zhang et al., AAAI 2023"
    family: ClassVar = "global model, mixed in by the client"
    has_global: ClassVar = True
    parts: ClassVar = {
        **{"extractor": shared(), "head": shared()},
        **{"personal_head": personal(like="head"), "weights": personal(), "history": personal()},
    }
    head_tier: ClassVar = HeadTier("adapted", "weights W on the head, then the head", extras=("head",))

    def init_own(self, client: str) -> Parts:
        own = super().init_own(client)
        ones = tree.map(torch.ones_like, own["personal_head"])
        return {**own, "weights": ones, "history": {"rounds": torch.zeros(())}}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        weights = self._learn_weights(down, own, data)
        start = {"extractor": down["extractor"], "head": mixed(down["head"], own["personal_head"], weights)}
        w = fit(self.loss, start, data, stage="train", epochs=self.epochs, optimiser=self.optimiser)
        history = {"rounds": own["history"]["rounds"] + 1}
        return w, {"personal_head": w["head"], "weights": weights, "history": history}

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        return {}, {**own, "weights": self._learn_weights(down, own, data)}

    def _learn_weights(self, down: Parts, own: Parts, data: Batches) -> Params:
        """W after one epoch; after as many as it needs on the second participation, unchanged (all 1) on the first."""
        theirs, ours, rounds = down["head"], own["personal_head"], own["history"]["rounds"]
        z = data.sample(self.share, "s1").features(self.net.extractor, down["extractor"])
        gap = tree.map(lambda a, b: (a - b) * (rounds > 0), theirs, ours)

        def step(weights: Params, batch: Batch) -> tuple[Params, Tensor]:
            head = mixed(theirs, ours, weights)
            slope = {path[0]: g for path, g in gradient(self.head_loss, head, batch).items()}
            moved = tree.map(lambda w, g, d: (w - self.weights_lr * g * d).clamp(0, 1), weights, slope, gap)
            return moved, self.head_loss(head, batch)  # Eq. 5

        epochs, threshold = self.first_epochs, self.threshold
        return settle(step, own["weights"], z, rounds != 1, stage="s1", epochs=epochs, threshold=threshold)

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        head = mixed(parts["head"], parts["personal_head"], parts["weights"])
        return self.classify({**parts, "head": head}, x)
