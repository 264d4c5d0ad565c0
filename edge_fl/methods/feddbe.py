"""FedDBE: FedAvg in which each client keeps its own bias of the features, so that the shared extractor need not learn it (FedAvg+DBE).

The bias b_i is a trained vector that never leaves the client. A second term pulls the mean of the client's features to the mean over all
clients, measured once.

    min ℓ(h(f(x) + b_i), y) + κ/2 mean_d (m - m^g)²,   m ← (1 - μ) m + μ mean_batch f(x), from 0 in every round
    m^g = Σ_i p_i m_i of the first round, which trains without b_i and without the second term

Source: J. Zhang, Y. Hua, J. Cao, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan, "Eliminating Domain Bias for Federated Learning in
Representation Space", NeurIPS 2023 (FedAvg+DBE).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import apply_gradient, gradient_and_aux, scan
from edge_fl.learn.losses import cross_entropy
from edge_fl.learn.network.part import personal, shared
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import SHARED_MODEL, HeadTier, Method, hyper

Carry = tuple[Parts, Any, Tensor]  # w with the bias, optimiser state, m


@dataclass(frozen=True)
class FedDBE(Method):
    """Shared model and mean feature m^g; personal is the bias b_i, 0 at the start."""

    kappa: float = hyper(
        1.0, "κ, pull of the mean feature to the global one; 0: none", low=0, source="[D]; 50 in the code [C]"
    )
    momentum: float = hyper(
        1.0, "μ, share of the newest batch in the mean feature", low=0, high=1, source="its run script [C]"
    )

    title = "FedDBE"
    citation = "Zhang et al., NeurIPS 2023"
    family = "global model, personal bias"
    grid = {"kappa": (0.1, 1.0, 10.0), "momentum": (0.1, 1.0)}
    has_global = True
    parts = {**SHARED_MODEL, "feature_mean": shared(), "bias": personal()}
    head_tier = HeadTier("adapted", "head, which absorbs the bias", ("head",))
    deviations = (
        "round 1 measures the global mean and trains; the code measures it beforehand with all clients"
    )

    def init_shared(self) -> Parts:
        mean = {"mean": torch.zeros(self.net.feature_dim), "known": torch.zeros(())}
        return {**super().init_shared(), "feature_mean": mean}

    def init_own(self, client: str) -> Parts:
        return {"bias": {"vector": torch.zeros(self.net.feature_dim)}}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, target, known = self.net, down["feature_mean"]["mean"], down["feature_mean"]["known"]

        def step(carry: Carry, batch: Batch) -> Carry:
            w, state, before = carry

            def loss(w: Parts, batch: Batch) -> tuple[Tensor, Tensor]:
                z = net.extractor(w["extractor"], batch.x)
                newest = (z * batch.real[:, None]).sum(0) / batch.real.sum().clamp(min=1)
                mean = (1 - self.momentum) * before + self.momentum * newest
                logits = net.head(w["head"], z + known * w["bias"]["vector"])
                pull = known * self.kappa * 0.5 * ((mean - target) ** 2).mean()
                return cross_entropy(logits, batch.y, batch.mask) + pull, mean

            grads, mean = gradient_and_aux(loss, w, batch)
            w, state = apply_gradient(w, grads, state, self.optimiser)
            return w, state, mean

        w = {"extractor": down["extractor"], "head": down["head"], "bias": own["bias"]}
        start = (w, self.optimiser.init(tree.parameters(w)), torch.zeros_like(target))
        norm = tree.has_buffers(w)
        w, _, mean = scan(step, start, data, stage="train", epochs=self.epochs, norm=norm)
        up = {
            "extractor": w["extractor"],
            "head": w["head"],
            "feature_mean": {"mean": mean, "known": 1 - known},
        }
        return up, {"bias": w["bias"]}

    def pack(self, up: Parts) -> Parts:
        """The mean feature travels in the first round only."""
        return {name: part for name, part in up.items() if name != "feature_mean" or part["known"] > 0}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        return self.net.head.frozen(parts["head"], self.features(parts, x) + parts["bias"]["vector"])
