"""FedAMP: Y. Huang, L. Chu, Z. Zhou, L. Wang, J. Liu, J. Pei, Y. Zhang, "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI
2021. There is no global model: the server mixes for every client the models of those that are like it (attentive message passing), and
the client is pulled towards that mixture.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from edge_fl.learn import attention, tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.losses import proximal
from edge_fl.learn.network.part import shared
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract.hyper import hyper
from edge_fl.methods.contract.method import PERSONAL, PERSONAL_MODEL, SHARED_MODEL, HeadTier, Method


@dataclass(frozen=True)
class FedAMP(Method):
    """Personal model w_i, sent up; the server's memory `mixed` holds each client's mixture u_i, of which it is sent its own."""

    lam: float = hyper(1.0, "λ, the pull towards u_i is λ/α; 0 is Local", low=0, source="[R]")
    alpha: float = hyper(1e4, "α_k", low=1e-12, source="[R]; 1 in PFLlib")
    sigma: float = hyper(
        1e6, "σ, squared distance where attention fades", low=1e-12, source="[R]; 1 in PFLlib"
    )
    variant: str = hyper("fedamp", "by distance, or by cosine", choices=("fedamp", "heur"), source="[P]")
    own_weight: float = hyper(0.5, "ξ_ii of `heur`", low=0, high=1, source="[R]")
    scale: float = hyper(10.0, "s of `heur`, attention ~ exp(s cos)", low=0, source="[R]")

    title: ClassVar = "FedAMP"
    citation: ClassVar = "Huang et al., AAAI 2021"
    family: ClassVar = "personal models, mixed"
    parts: ClassVar = {**SHARED_MODEL, "mixed": shared(), **PERSONAL_MODEL}
    sends: ClassVar = ("extractor", "head")
    exports: ClassVar = ()
    head_tier: ClassVar = HeadTier("none")
    deviations: ClassVar = "attention to others that adds up to more than 1 is scaled to 1"

    def init_shared(self) -> Parts:
        return {**super().init_shared(), "mixed": {}}

    def broadcast(self, shared: Parts, client: str) -> Parts:
        def pick(part: str) -> Params:
            return {key: shared["mixed"].get(f"{client}/{part}/{key}", t) for key, t in shared[part].items()}

        return {part: pick(part) for part in ("extractor", "head")}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        def loss(w: Parts, batch: Batch) -> Tensor:
            return self.loss(w, batch) + proximal(w, down, self.lam / self.alpha)  # Eq. 5

        w = tree.unprefixed(PERSONAL, own)
        w = fit(loss, w, data, stage="personal", epochs=self.epochs, optimiser=self.optimiser)
        return w, tree.prefixed(PERSONAL, w)

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        sent = {update.client: update.parts for update in updates}
        models = list(sent.values())
        found = attention.vectors(models)
        if self.variant == "heur":
            weights = attention.by_cosine(found, self.own_weight, self.scale)  # Eq. 9
        else:
            weights = attention.by_distance(found, self.alpha, self.sigma)  # Eq. 4
        mixed = dict(shared["mixed"])
        for client, model in zip(sent, attention.mixtures(models, weights), strict=True):
            mixed |= {
                f"{client}/{part}/{key}": t for part, params in model.items() for key, t in params.items()
            }
        return {**shared, "mixed": mixed}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        return self.classify(tree.unprefixed(PERSONAL, parts), x)
