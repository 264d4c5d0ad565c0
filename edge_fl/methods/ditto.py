"""Ditto: T. Li, S. Hu, A. Beirami, V. Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.

In addition to its part in FedAvg (model w) every client trains a personal model v regularised towards the received global model w^t.

    v ← argmin_v ℓ(v) + λ/2 ||v - w^t||²    Algorithm 1
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.batches import Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.objective import pulled
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.hyper import hyper
from edge_fl.methods.contract.method import PERSONAL, PERSONAL_MODEL, SHARED_MODEL, HeadTier, Method


@dataclass(frozen=True)
class Ditto(Method):
    """Shared model w, and a personal model v of the same network."""

    lam: float = hyper(1.0, "λ, pull of v towards w; 0 is Local", low=0, source="official runs [C]")
    personal_epochs: int = hyper(0, "epochs on v; 0 for as many as `epochs`", low=0, source="E_p = E [C]")

    title: ClassVar = "Ditto"
    citation: ClassVar = "Li et al., ICML 2021"
    family: ClassVar = "global and personal models"
    grid: ClassVar = {"lam": (0.1, 1.0, 2.0)}
    has_global: ClassVar = True
    parts: ClassVar = {**SHARED_MODEL, **PERSONAL_MODEL}
    head_tier: ClassVar = HeadTier(
        "adapted",
        "head, pulled towards the global head",
        extras=("head",),
        way="tuned",
        numbers={"pull": "lam"},
    )
    deviations: ClassVar = "v first, then w; official code interleaves them by batch, with the same anchor"

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        near = pulled(self.loss, down, self.lam)  # Algorithm 1, w as received
        v, epochs = tree.unprefixed(PERSONAL, own), self.personal_epochs or self.epochs
        v = fit(near, v, data, stage="personal", epochs=epochs, optimiser=self.optimiser)
        w = fit(self.loss, down, data, stage="train", epochs=self.epochs, optimiser=self.optimiser)
        return w, tree.prefixed(PERSONAL, v)

    def before_training(self, down: Parts, own: Parts) -> Parts:
        return {**own, **tree.prefixed(PERSONAL, down)}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        return self.classify(tree.unprefixed(PERSONAL, parts), x)
