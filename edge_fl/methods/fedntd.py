"""FedNTD: FedAvg with a distillation from the global model that leaves out each sample's own class, so that the others are kept.

The logits of the local model are s, those of the received one t; a tilde means without the sample's class y.

    min ℓ + β τ² mean KL(σ(t̃/τ) || σ(s̃/τ))    Eqs. 3 to 5

Source: G. Lee, M. Jeong, Y. Shin, S. Bae, S.-Y. Yun, "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
NeurIPS 2022.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.losses import cross_entropy, kl, one_hot
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import SHARED_MODEL, HeadTier, Method, hyper


@dataclass(frozen=True)
class FedNTD(Method):
    """Shared extractor and head; no personal part."""

    beta: float = hyper(1.0, "β, weight of the distillation; 0: none", low=0, source="official code [C]")
    tau: float = hyper(1.0, "τ, temperature", low=1e-3, source="official code [C]")

    title = "FedNTD"
    citation = "Lee et al., NeurIPS 2022"
    family = "global model"
    grid = {"beta": (0.3, 1.0, 3.0), "tau": (1.0, 3.0)}
    has_global = True
    uniform = True
    parts = SHARED_MODEL
    head_tier = HeadTier("adapted", "head", extras=("head",))
    deviations = "equal weights, as in Algorithm 1; the code weighs by samples"

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, received = self.net, tree.map(data.copy, down)
        teacher = data.once(lambda x: self.classify(received, x))

        def loss(w: Parts, batch: Batch) -> Tensor:
            student = net.head(w["head"], net.extractor(w["extractor"], batch.x))
            s, t = (not_true(logits / self.tau, batch.y) for logits in (student, teacher(batch)))
            distilled = self.tau**2 * kl(s, t, batch.mask)
            return cross_entropy(student, batch.y, batch.mask) + self.beta * distilled

        return self.train(loss if self.beta else self.loss, down, data), own


def not_true(logits: Tensor, y: Tensor) -> Tensor:
    """Logits [B, C] whose softmax is 0 at the labels y [B]."""
    return torch.where(one_hot(y, logits.shape[1]) > 0, torch.finfo(logits.dtype).min, logits)
