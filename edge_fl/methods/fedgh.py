"""FedGH: every client has its own extractor; the server trains the shared head on the class means of features that clients send.

A client trains its extractor with a copy of the shared head.

Source: L. Yi, G. Wang, X. Liu, Z. Shi, H. Yu, "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM MM 2023.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from edge_fl.learn.aggregation.mean import PROTOTYPES, Update, prototypes, with_absent
from edge_fl.learn.batches import Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.network.part import personal, shared
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import HeadTier, Method, hyper


@dataclass(frozen=True)
class FedGH(Method):
    """Clients receive the shared head and send class means; they send no parameters."""

    server_lr: float = hyper(
        0.01, "learning rate of the server", low=0, source="[D]; PFLlib shares 1.0 with SCAFFOLD"
    )
    server_batch: int = hyper(10, "class means per step on the server", low=1, source="[C]")
    server_clip: float = hyper(
        50.0, "limit of the norm of the server's gradients; 0: none", low=0, source="[C]"
    )

    title = "FedGH"
    citation = "Yi et al., ACM MM 2023"
    family = "shared head, trained by the server"
    grid = {"server_lr": (0.01, 0.1, 1.0)}
    parts = {"head": shared(), "prototypes": shared(), "extractor": personal()}
    exports = ()
    head_tier = HeadTier("none")

    def init_shared(self) -> Parts:
        return {"head": self.net.head.init()}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        start = {"extractor": own["extractor"], "head": down["head"]}
        w = self.train(self.loss, start, data)
        means = prototypes(data.features(self.net.extractor, w["extractor"]))
        return {PROTOTYPES: means}, {"extractor": w["extractor"]}

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        """One epoch of SGD on all class means of the round (Eq. 6), in an order drawn from the seed."""
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
