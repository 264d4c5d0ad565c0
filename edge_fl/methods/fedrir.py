"""FedRIR: Y. Huang, Z. Shao, Z. Yang, Z. Lu, Y. Zhang, "FedRIR: Rethinking Information Representation in Federated Learning", WWW 2025. A
client's own extractor learns to fill in masked images; the shared one is kept free of what it knows by bounding their mutual information.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from edge_fl.config import OptimiserConfig
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import Trained, descend, descend_together, fit_from, scan
from edge_fl.learn.losses import cross_entropy
from edge_fl.learn.network.part import shared
from edge_fl.learn.tree import Parts, clone, flat, has_buffers
from edge_fl.methods.contract.hyper import hyper
from edge_fl.methods.contract.method import BatchNorm, HeadTier, Method
from edge_fl.models import fedrir


@dataclass(frozen=True)
class FedRIR(Method):
    """Shared extractor; personal are a specific extractor, its decoder, the estimator q, a head on both features, Adam's states."""

    mask: float = hyper(0.6, "share of 4x4 patches that is hidden, 0: none", low=0, high=1, source="[P]")
    kld_weight: float = hyper(0.1, "weight of the KL term in reconstruction", low=0, source="[C]")
    id_weight: float = hyper(1.0, "λ_id, weight of the bound; 0.01 to 1 is wise", low=0, source="[P]")
    id_objective: str = hyper("vclub", "nll_joint: official code [C]", choices=tuple(fedrir.OBJECTIVES))
    id_clamp: bool = hyper(True, "a negative bound counts as 0, else vclub diverges", source="[D]")

    title: ClassVar = "FedRIR"
    citation: ClassVar = "Huang et al., WWW 2025"
    family: ClassVar = "shared extractor, personal one beside it"
    parts: ClassVar = {"extractor": shared(), **fedrir.PARTS}
    batch_norm: ClassVar = BatchNorm.LOCAL_STATS
    head_tier: ClassVar = HeadTier("adapted", "head on the shared extractor alone")
    usual_optimiser: ClassVar = OptimiserConfig("adam", 5e-4)
    deviations: ClassVar = "q is fitted by likelihood (paper: with L_id); a negative bound counts as 0"

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, opt, epochs = self.net, self.optimiser, self.epochs
        fitted, bound = fedrir.objective(self.id_objective, self.id_clamp)
        s1 = {name: own[name] for name in ("specific_extractor", "decoder")}
        q, w = {"estimator": own["estimator"]}, {"extractor": down["extractor"], "head": own["head"]}
        fill = partial(fedrir.reconstruction, net, self.mask, self.kld_weight)
        s1_state = self.resumed(own["s1_state"], s1)
        s1, s1_state = fit_from(s1_state, fill, s1, data, stage="s1", epochs=epochs, optimiser=opt)

        def step(carry: Trained, batch: Batch) -> Trained:
            ((q, q_state), (w, state)), f_cs = carry, fedrir.specific_feature(net, s1, batch.x)

            def explain(q: Parts, batch: Batch) -> Tensor:
                return fitted(net, q, net.extractor(clone(w["extractor"]), batch.x), f_cs, batch.mask)

            def separate(w: Parts, batch: Batch) -> Tensor:
                f_g = net.extractor(w["extractor"], batch.x)
                logits = net.head(w["head"], torch.cat([f_g, f_cs], dim=1))
                leak = self.id_weight * bound(net, {**q, **w}, f_g, f_cs, batch.mask)
                return cross_entropy(logits, batch.y, batch.mask) + leak

            if fitted is bound:  # one step of both
                return descend_together(separate, carry, batch, opt)
            q, q_state = descend(explain, q, q_state, batch, opt)  # stage 2a
            return (q, q_state), descend(separate, w, state, batch, opt)  # stage 2b

        carry: Trained = (q, self.resumed(own["q_state"], q)), (w, self.resumed(own["s2_state"], w))
        (q, q_state), (w, s2_state) = scan(step, carry, data, stage="s2", epochs=epochs, norm=has_buffers(w))
        states = {"s1_state": flat(s1_state), "q_state": flat(q_state), "s2_state": flat(s2_state)}
        return {"extractor": w["extractor"]}, {**s1, **q, "head": w["head"], **states}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        both = [self.features(parts, x), fedrir.specific_feature(self.net, parts, x)]
        return self.net.head.frozen(parts["head"], torch.cat(both, dim=1))

    def measure(self, parts: Parts, data: Batches) -> dict[str, Tensor]:
        return fedrir.separation(self.net, parts, data)
