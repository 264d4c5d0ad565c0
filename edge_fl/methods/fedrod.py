"""Fed-RoD: H.-Y. Chen, W.-L. Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022.

The shared extractor and generic head h are trained with the balanced softmax loss, which corrects for the client's class frequencies. A
personal head h_i is trained on top, with the cross-entropy of the summed logits; it changes neither extractor nor generic head.

    generic:   CE(h(z)_c + log n_{i,c})    Eq. 5, docs/methods.md F7
    personal:  CE(sg[h(z)] + h_i(sg[z]))   Eq. 7
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.losses import balanced_cross_entropy, cross_entropy
from edge_fl.learn.network.part import personal, shared
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.hyper import hyper
from edge_fl.methods.contract.method import PERSONAL, HeadTier, Method


@dataclass(frozen=True)
class FedRoD(Method):
    """Shared extractor and generic head, linear personal head; their logits add up."""

    exponent: float = hyper(1.0, "of class counts in the balanced softmax; 0: none", low=0, source="[P]")

    title: ClassVar = "Fed-RoD"
    citation: ClassVar = "Chen and Chao, ICLR 2022"
    family: ClassVar = "shared extractor, two heads"
    grid: ClassVar = {"exponent": (0.0, 0.5, 1.0)}
    has_global: ClassVar = True
    parts: ClassVar = {"extractor": shared(), "head": shared(), "personal_head": personal(like="head")}
    head_tier: ClassVar = HeadTier(
        "native",
        "personal head in addition to the frozen generic one",
        extras=("head",),
        way="tuned",
        numbers={
            "times": 2.0
        },  # both heads are linear and start equal: their sum is one head with twice the weights
    )
    deviations: ClassVar = "linear personal head, no hypernetwork"

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, counts = self.net, data.counts**self.exponent

        def loss(w: Parts, batch: Batch) -> Tensor:
            # The losses have no parameter in common, so one step on their sum is one step on each.
            z = net.extractor(w["extractor"], batch.x)
            generic = net.head(w["head"], z)
            correction = net.personal_head(w["personal_head"], z.detach())
            balanced = balanced_cross_entropy(generic, batch.y, counts, batch.mask)  # Eq. 5
            return balanced + cross_entropy(generic.detach() + correction, batch.y, batch.mask)  # Eq. 7

        w = fit(loss, {**down, **own}, data, stage="train", epochs=self.epochs, optimiser=self.optimiser)
        return {name: w[name] for name in down}, {name: w[name] for name in own}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        return self.classify(parts, x) + self.classify(parts, x, PERSONAL + "head")
