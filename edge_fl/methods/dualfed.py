"""DualFed: G. Zhu, X. Liu, J. Niu, S. Tang, X. Wu, J. Zhang, "DualFed: Enjoying both Generalization and Personalization in Federated
Learning via Hierarchical Representations", ACM MM 2024.

A personal projector between the shared extractor and the personal head lets the extractor stay general. Each client first trains extractor,
projector and personal head with cross-entropy and a supervised contrastive loss, then the global head on the extractor's features z. Both
heads are combined for prediction; the server averages with equal weights.

    s1  min ℓ(head(u)) + λ SupCon(u/||u||; τ),  u = projector(z)    Eqs. 6 to 8, docs/methods.md F1
    s2  min ℓ(global_head(z))                                       Eq. 9
    predict  softmax(head(u)) + softmax(global_head(z))             Eq. 5
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from edge_fl.config import OptimiserConfig
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.losses import cross_entropy, supcon, unit
from edge_fl.learn.network.part import Net, linear_head, personal, shared
from edge_fl.learn.tree import Parts, buffers, merge
from edge_fl.methods.contract.hyper import hyper
from edge_fl.methods.contract.method import BatchNorm, HeadTier, Method


def _projector(net: Net, method: DualFed) -> nn.Module:
    """Features [N, d] -> [N, d]: Linear to d/2, ReLU, BatchNorm, Linear back to d, BatchNorm."""
    dim, half = net.feature_dim, max(net.feature_dim // 2, 1)
    first = [nn.Linear(dim, half), nn.ReLU(), nn.BatchNorm1d(half)]
    return nn.Sequential(*first, nn.Linear(half, dim), nn.BatchNorm1d(dim))


@dataclass(frozen=True)
class DualFed(Method):
    """Shared extractor and global head; personal projector and head. Equal client weights."""

    contrast: float = hyper(
        2.0, "λ of the contrastive loss; 0: none; PACS 40", low=0, source="Office-Home [C]"
    )
    temperature: float = hyper(0.2, "τ of the contrastive loss", low=1e-3, source="PACS [C]")
    ensemble: str = hyper(
        "prob", "how both heads are combined, Eq. 5 [P]", choices=("prob", "logit", "personal")
    )
    training: str = hyper(
        "stages", "two stages, or all at once (Table 4)", choices=("stages", "simultaneous"), source="[P]"
    )
    frozen_bn: str = hyper("eval", "BatchNorm in stage 2; train [C]", choices=("eval", "train"), source="[D]")

    title: ClassVar = "DualFed"
    citation: ClassVar = "Zhu et al., ACM MM 2024"
    family: ClassVar = "shared extractor, two heads"
    has_global: ClassVar = True
    uniform: ClassVar = True
    batch_norm: ClassVar = BatchNorm.LOCAL_STATS
    parts: ClassVar = {
        "extractor": shared(),
        "global_head": shared(linear_head, like="head"),
        "projector": personal(_projector, salted=True),
        "head": personal(),
    }
    head_tier: ClassVar = HeadTier(
        "adapted", "both heads", ("global_head",), {"global_head": "trained_head"}, "global_head", "ensemble"
    )
    usual_optimiser: ClassVar = OptimiserConfig("sgd", 0.01, momentum=0.5)
    deviations: ClassVar = (
        "probabilities are summed (official code: logits); frozen parts run in inference behaviour"
    )

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, w, together = self.net, {**down, **own}, self.training == "simultaneous"

        def stage_1(w: Parts, batch: Batch) -> Tensor:  # Eqs. 6 to 8; with Eq. 9 if simultaneous
            z = net.extractor(w["extractor"], batch.x)
            u = net.projector(w["projector"], z)
            contrast = self.contrast * supcon(unit(u), batch.y, self.temperature, batch.mask)
            heads = [net.head(w["head"], u)]
            heads += [net.global_head(w["global_head"], z)] if "global_head" in w else []
            return sum((cross_entropy(logits, batch.y, batch.mask) for logits in heads), contrast)

        def stage_2(w2: Parts, batch: Batch) -> Tensor:  # Eq. 9
            extractor = net.extractor if w2["extractor"] else net.extractor.frozen
            z = extractor({**w["extractor"], **w2["extractor"]}, batch.x)
            return cross_entropy(net.global_head(w2["global_head"], z), batch.y, batch.mask)

        trained = w if together else {name: w[name] for name in ("extractor", *own)}
        w |= fit(stage_1, trained, data, stage="s1", epochs=self.epochs, optimiser=self.optimiser)
        if not together:
            statistics = buffers(w["extractor"]) if self.frozen_bn == "train" else {}
            trained = {"global_head": w["global_head"], "extractor": statistics}
            w = merge(
                w, fit(stage_2, trained, data, stage="s2", epochs=self.epochs, optimiser=self.optimiser)
            )
        return {name: w[name] for name in down}, {name: w[name] for name in own}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        z = self.features(parts, x)
        p = self.net.head.frozen(parts["head"], self.net.projector.frozen(parts["projector"], z))
        g = self.net.global_head.frozen(parts["global_head"], z)
        return {"prob": p.softmax(1) + g.softmax(1), "logit": p + g, "personal": p}[self.ensemble]  # Eq. 5
