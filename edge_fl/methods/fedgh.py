"""FedGH: L. Yi, G. Wang, X. Liu, Z. Shi, H. Yu, "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM MM 2023.
Clients keep their extractors and send class means of features; the server trains the one header that all of them use on these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from edge_fl.learn.aggregation.mean import PROTOTYPES, Update, prototypes, with_absent
from edge_fl.learn.batches import Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.network.part import personal, shared
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.hyper import hyper
from edge_fl.methods.contract.method import HeadTier, Method


@dataclass(frozen=True)
class FedGH(Method):
    """The head travels down and class means travel up; no parameter is ever uploaded."""

    server_lr: float = hyper(
        0.01, "learning rate of the server's head", low=0, source="[D]; PFLlib's 1.0 is another method's"
    )
    server_batch: int = hyper(10, "class means per step on the server", low=1, source="[C]")
    server_clip: float = hyper(
        50.0, "joint norm that the server's gradients are cut to, 0: none", low=0, source="[C]"
    )

    title: ClassVar = "FedGH"
    citation: ClassVar = "Yi et al., ACM MM 2023"
    family: ClassVar = "shared head, trained by the server"
    parts: ClassVar = {"head": shared(), "prototypes": shared(), "extractor": personal()}
    exports: ClassVar = ()
    head_tier: ClassVar = HeadTier("none")

    def init_shared(self) -> Parts:
        return {"head": self.net.head.init()}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        start = {"extractor": own["extractor"], "head": down["head"]}
        w = fit(self.loss, start, data, stage="train", epochs=self.epochs, optimiser=self.optimiser)
        means = prototypes(data.features(self.net.extractor, w["extractor"]))
        return {PROTOTYPES: means}, {"extractor": w["extractor"]}

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        """One pass of SGD over all class means of the round (Eq. 6), in an order drawn from the seed."""
        sent = [with_absent(update.parts[PROTOTYPES]) for update in updates if PROTOTYPES in update.parts]
        if not sent:
            return shared
        means = torch.cat([known["mean"][known["count"] > 0] for known in sent])
        labels = torch.cat([(known["count"] > 0).nonzero()[:, 0] for known in sent])
        data = Batches(means, labels, self.net.classes, self.server_batch, self.net.seed, client="server")
        optimiser = Sgd(self.server_lr, max_norm=self.server_clip)
        return {
            "head": fit(self.head_loss, shared["head"], data, stage="server", epochs=1, optimiser=optimiser)
        }
