"""FedProto: clients keep their models and exchange only class means of features (prototypes).

Training pulls each feature towards the global prototype C̄_y of its class; a client predicts the class of the nearest global prototype.

    client:  min ℓ + λ mean ||f(x) - C̄_y||²/d, then C_{i,c} = mean f(x) over class c     Eqs. 7 and 3
    server:  C̄_c = mean of C_{i,c} over the clients that have class c                    Eq. 6

Source: Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang, "FedProto: Federated Prototype Learning across Heterogeneous Clients",
AAAI 2022.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update, prototypes, weighted_mean
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import gradient_and_features, scan
from edge_fl.learn.losses import masked_mean, one_hot
from edge_fl.learn.network.part import personal, shared
from edge_fl.learn.objective import CrossEntropy
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract.method import HeadTier, Method, hyper

# model, optimiser state, sums of features by class [C, d], samples by class [C]
Carry = tuple[Parts, Any, Tensor, Tensor]


@dataclass(frozen=True)
class FedProto(Method):
    """Shared prototypes; personal extractor and head."""

    lam: float = hyper(
        1.0, "λ, weight of the distance to the prototypes; 0 is Local", low=0, source="[P]; 0.1 for CIFAR [C]"
    )
    weighted: bool = hyper(
        False, "weight prototypes by samples instead of equally", source="equal in both codes [C]"
    )
    means: str = hyper(
        "after",
        "class means of the trained extractor, or of the features during training, which saves a forward pass",
        choices=("after", "during"),
        source="after: Eq. 3 [P]; during: in all epochs, PFLlib, or in the last one, official code [C]",
    )
    inference: str = hyper(
        "prototype", "prediction by prototypes or head", choices=("prototype", "head"), source="[P]"
    )

    title = "FedProto"
    citation = "Tan et al., AAAI 2022"
    family = "prototypes"
    grid = {"lam": (0.1, 1.0, 4.0)}
    parts = {"prototypes": shared(), "extractor": personal(), "head": personal()}
    exports = ()
    head_tier = HeadTier("none")
    deviations = (
        "prototypes are the plain mean over clients that have the class, because the paper's weights do not sum to 1;"
        ' class means are taken after training (Eq. 3), not during its last epoch (code), unless `means` is "during"'
    )

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, known = self.net, down["prototypes"]

        def distance(z: Tensor, batch: Batch) -> Tensor:
            apart = ((z - known["mean"][batch.y]) ** 2).mean(-1)  # Eq. 7
            return self.lam * masked_mean(torch.where(known["count"][batch.y] > 0, apart, 0.0), batch.mask)

        loss = replace(self.loss, on_features=distance) if self.lam else self.loss
        if self.means == "during":
            return self._train_with_means(loss, own, known, data)
        own = self.train(loss, own, data, stage="personal")
        return {"prototypes": prototypes(data.features(net.extractor, own["extractor"]))}, own  # Eq. 3

    def _train_with_means(
        self, loss: CrossEntropy, own: Parts, known: Params, data: Batches
    ) -> tuple[Parts, Parts]:
        """Train the model; the class means are those of all features that its training computes."""

        def step(carry: Carry, batch: Batch) -> Carry:
            own, state, sums, counts = carry
            grads, z = gradient_and_features(loss, own, batch)
            self.optimiser.advance(tree.parameters(own), grads, state)
            member = one_hot(batch.y, data.classes) * batch.real[:, None]
            return own, state, sums + member.T @ z, counts + member.sum(0)

        state = self.optimiser.init(tree.parameters(own))
        carry = own, state, torch.zeros_like(known["mean"]), torch.zeros_like(known["count"])
        norm = tree.has_buffers(own)
        own, _, sums, counts = scan(step, carry, data, stage="personal", epochs=self.epochs, norm=norm)
        seen = torch.where(counts > 0, data.counts, 0.0)
        return {"prototypes": {"mean": sums / counts.clamp(min=1)[:, None], "count": seen}}, own

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        return weighted_mean(shared, updates, by_count=self.weighted)  # Eq. 6

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        known = parts["prototypes"]
        if self.inference == "head" or not bool((known["count"] > 0).any()):
            return self.classify(parts, x)
        distance = torch.cdist(self.features(parts, x), known["mean"])  # Eq. 8
        return torch.where(known["count"] > 0, -distance, torch.finfo(distance.dtype).min)
