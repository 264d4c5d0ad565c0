"""FedCRL, later FedCoSR: clients share an extractor and class means of features, to which a contrastive loss pulls each feature.

Each feature z is pulled towards the global mean Ω_y of its class. Before training, a client mixes its own extractor with the global one:
the lower its last contrastive loss, the more of its own it keeps.

    τ_mix = exp(-γ L_con),  φ̂ = τ_mix φ_i + (1 - τ_mix) φ^G                           Eqs. 7 to 9
    min ℓ + α L_con,  L_con = -log[ exp(cos(z, Ω_y)/τ) / Σ_c exp(cos(z, Ω_c)/τ) ]      Eq. 12, docs/methods-formulas.md F3
    server: φ^G = Σ p_i φ_i,  Ω_c = Σ n_{i,c} ω_{i,c} / Σ n_{i,c}                      Eqs. 5 and 6

Source: C. Huang, X. Chen, Y. Zhang, H. Wang, "FedCRL: Personalized Federated Learning with Contrastive Shared Representations for Label
Heterogeneity in Non-IID Data", arXiv:2404.17916 (2024); IEEE Trans. Cybernetics 55(12), 2025.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from edge_fl.config import OptimiserConfig
from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import PROTOTYPES, lerp, prototypes
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import apply_gradient, gradient_and_aux, scan
from edge_fl.learn.losses import cross_entropy, prototype_contrast
from edge_fl.learn.network.part import history, personal, shared
from edge_fl.learn.random import dropout, fold
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import HeadTier, Method, hyper

# w, optimiser state, sum of L_con over samples, number of these samples
Carry = tuple[Parts, Any, Tensor, Tensor]


@dataclass(frozen=True)
class FedCRL(Method):
    """Shared extractor φ^G and prototypes Ω, personal head and extractor φ_i."""

    alpha: float = hyper(1.0, "weight of the contrastive loss; 0: none", low=0, source="[P]")
    temperature: float = hyper(0.1, "τ of the contrastive loss", low=1e-3, source="[P]")
    gamma: float = hyper(0.8, "γ; 0: keep the own extractor", low=0, high=1e9, source="[P]")
    dropout: float = hyper(0.3, "dropout on the input of the head", low=0, high=0.99, source="[P]")
    param_clip: str = hyper("none", "clipping; Alg. 1, l. 22 [D]", choices=("none", "grad_norm", "params01"))
    reg_probe: str = hyper("train", "when L_con is measured; Eq. 12 [P]", choices=("train", "eval"))

    title = "FedCRL"
    citation = "Huang et al., arXiv:2404.17916 (2024); FedCoSR, IEEE Trans. Cybernetics 2025"
    family = "shared extractor, prototypes"
    grid = {"alpha": (0.1, 1.0, 5.0), "gamma": (0.2, 0.8, 2.0)}
    own = {"head": personal(), "personal_extractor": personal(like="extractor")}
    past = history(trained=0.0, misfit=-1.0)
    parts = {"extractor": shared(), "prototypes": shared(), **own, "history": past}
    head_tier = HeadTier("adapted", "head", (PROTOTYPES,), {PROTOTYPES: "class_means"}, PROTOTYPES)
    measures = ("fedcrl.tau_mix",)
    usual_optimiser = OptimiserConfig("adam", 0.003)
    deviations = "weights are not clipped into [0, 1] (Alg. 1, l. 22), which would destroy them"

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, omega, mix = self.net, down["prototypes"], self.mix(down, own, data)
        optimiser = replace(self.optimiser, max_norm=float(self.param_clip == "grad_norm"))

        def loss(w: Parts, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            z, y = net.extractor(w["extractor"], batch.x), batch.y
            contrast = prototype_contrast(z, y, omega, self.temperature, batch.mask)  # Eq. 12
            samples = (batch.real * (omega["count"][y] > 0)).sum()
            logits = net.head(w["head"], dropout(fold(batch.key, 1), z, self.dropout))
            return cross_entropy(logits, y, batch.mask) + self.alpha * contrast, (contrast, samples)

        def step(carry: Carry, batch: Batch) -> Carry:
            w, state, total, number = carry
            grads, (contrast, samples) = gradient_and_aux(loss, w, batch)
            w, state = apply_gradient(w, grads, state, optimiser)
            return w, state, total + contrast * samples, number + samples

        w = {"extractor": lerp(own["personal_extractor"], down["extractor"], mix), "head": own["head"]}
        zero = torch.zeros((), device=data.x.device)
        start, norm = (w, optimiser.init(tree.parameters(w)), zero, zero), tree.has_buffers(w)
        w, _, total, number = scan(step, start, data, stage="train", epochs=self.epochs, norm=norm)
        if self.param_clip == "params01":
            w = tree.replaced(w, {path: t.clamp(0, 1) for path, t in tree.parameters(w).items()})
        contrast = torch.where(number > 0, total / number.clamp(min=1), -1.0)  # -1: no sample had a prototype
        past = {"trained": torch.ones_like(mix), "misfit": contrast}
        means = prototypes(data.features(net.extractor, w["extractor"]))  # Eq. 3
        own = {"head": w["head"], "personal_extractor": w["extractor"], "history": past}
        return {"extractor": w["extractor"], "prototypes": means}, own

    def mix(self, down: Parts, own: Parts, data: Batches) -> Tensor:
        """τ_mix, the weight of the client's own extractor; 0 if it never trained."""
        z, last = data.features(self.net.extractor, own["personal_extractor"]), own["history"]["misfit"]
        now = prototype_contrast(z.x, z.y, down["prototypes"], self.temperature)
        contrast = torch.where((last >= 0) & (self.reg_probe == "train"), last, now)
        return own["history"]["trained"] * torch.exp(-self.gamma * contrast)

    def measure(self, parts: Parts, data: Batches) -> dict[str, Tensor]:
        return {"fedcrl.tau_mix": self.mix(parts, parts, data)}
