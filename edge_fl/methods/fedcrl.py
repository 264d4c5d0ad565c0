"""FedCRL, later FedCoSR: C. Huang, X. Chen, Y. Zhang, H. Wang, arXiv:2404.17916 (2024); IEEE Trans. Cybernetics 55(12), 2025. Class means
travel and pull features by contrast; how badly they fit a client's features says how much of the global extractor it takes over.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from edge_fl.config import OptimiserConfig
from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import PROTOTYPES, lerp, prototypes
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import fit_measuring
from edge_fl.learn.losses import cross_entropy, prototype_contrast
from edge_fl.learn.network.part import history, personal, shared
from edge_fl.learn.random import dropout, fold
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.hyper import hyper
from edge_fl.methods.contract.method import HeadTier, Method


@dataclass(frozen=True)
class FedCRL(Method):
    """Shared extractor and prototypes, personal head; each client keeps its own extractor to mix with the global one."""

    alpha: float = hyper(1.0, "weight of the contrast, 0: none", low=0, source="[P]")
    temperature: float = hyper(0.1, "τ of the contrast", low=1e-3, source="[P]")
    gamma: float = hyper(0.8, "γ, 0: nothing is taken over", low=0, high=1e9, source="[P]")
    dropout: float = hyper(0.3, "on the input of the head", low=0, high=0.99, source="[P]")
    param_clip: str = hyper("none", "Alg. 1, l. 22 [D]", choices=("none", "grad_norm", "params01"))
    reg_probe: str = hyper("train", "when misfit is measured; Eq. 12 [P]", choices=("train", "eval"))

    title: ClassVar = "FedCRL"
    citation: ClassVar = "Huang et al., arXiv:2404.17916 (2024); FedCoSR, IEEE Trans. Cybernetics 2025"
    family: ClassVar = "shared extractor, prototypes"
    own: ClassVar = {"head": personal(), "personal_extractor": personal(like="extractor")}
    past: ClassVar = history(trained=0.0, misfit=-1.0)
    parts: ClassVar = {"extractor": shared(), "prototypes": shared(), **own, "history": past}
    head_tier: ClassVar = HeadTier("adapted", "head", (PROTOTYPES,), {PROTOTYPES: "class_means"}, PROTOTYPES)
    usual_optimiser: ClassVar = OptimiserConfig("adam", 0.003)
    deviations: ClassVar = "weights are not clipped into [0, 1] (Alg. 1, l. 22): that would destroy them"

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, omega, mix = self.net, down["prototypes"], self.mix(down, own, data)

        def loss(w: Parts, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            z, y = net.extractor(w["extractor"], batch.x), batch.y
            misfit = prototype_contrast(z, y, omega, self.temperature, batch.mask)  # Eq. 12
            number = (batch.real * (omega["count"][y] > 0)).sum()
            logits = net.head(w["head"], dropout(fold(batch.key, 1), z, self.dropout))
            return cross_entropy(logits, y, batch.mask) + self.alpha * misfit, (misfit, number)

        w = {"extractor": lerp(own["personal_extractor"], down["extractor"], mix), "head": own["head"]}
        opt = replace(self.optimiser, max_norm=float(self.param_clip == "grad_norm"))
        w, (misfit, number) = fit_measuring(loss, w, data, stage="train", epochs=self.epochs, optimiser=opt)
        if self.param_clip == "params01":
            w = tree.replaced(w, {path: t.clamp(0, 1) for path, t in tree.parameters(w).items()})
        past = {"trained": torch.ones_like(mix), "misfit": torch.where(number > 0, misfit, -1.0)}
        means = prototypes(data.features(net.extractor, w["extractor"]))  # Eq. 3
        own = {"head": w["head"], "personal_extractor": w["extractor"], "history": past}
        return {"extractor": w["extractor"], "prototypes": means}, own

    def mix(self, down: Parts, own: Parts, data: Batches) -> Tensor:
        """How much of its own extractor a client keeps (Eqs. 7 to 9), by its last misfit; 0 if it never trained."""
        z, misfit = data.features(self.net.extractor, own["personal_extractor"]), own["history"]["misfit"]
        fresh = prototype_contrast(z.x, z.y, down["prototypes"], self.temperature)
        misfit = torch.where((misfit >= 0) & (self.reg_probe == "train"), misfit, fresh)
        return own["history"]["trained"] * torch.exp(-self.gamma * misfit)

    def measure(self, parts: Parts, data: Batches) -> dict[str, Tensor]:
        return {"fedcrl.tau_mix": self.mix(parts, parts, data)}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        phi = tree.where(parts["history"]["trained"], parts["personal_extractor"], parts["extractor"])
        return self.classify({"extractor": phi, "head": parts["head"]}, x)
