"""Ditto: besides the model of FedAvg, w, every client trains a personal model v, which is regularised towards the received w^t.

    v ← argmin_v ℓ(v) + λ/2 ||v - w^t||²    Algorithm 1

Source: T. Li, S. Hu, A. Beirami, V. Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.
"""

from dataclasses import dataclass

from edge_fl.learn import tree
from edge_fl.learn.batches import Batches
from edge_fl.learn.objective import pulled
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import PERSONAL, PERSONAL_MODEL, SHARED_MODEL, HeadTier, Method, hyper


@dataclass(frozen=True)
class Ditto(Method):
    """Shared model w, and a personal model v of the same network."""

    lam: float = hyper(1.0, "λ, pull of v towards w; 0 is Local", low=0, source="official runs [C]")
    personal_epochs: int = hyper(0, "epochs on v; 0 for as many as `epochs`", low=0, source="E_p = E [C]")

    title = "Ditto"
    citation = "Li et al., ICML 2021"
    family = "global and personal models"
    grid = {"lam": (0.1, 1.0, 2.0)}
    has_global = True
    parts = {**SHARED_MODEL, **PERSONAL_MODEL}
    head_tier = HeadTier(
        "adapted",
        "head, pulled towards the global head",
        extras=("head",),
        way="tuned",
        numbers={"pull": "lam"},
    )
    deviations = "v first, then w; official code interleaves them by batch, with the same anchor"

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        near = pulled(self.loss, down, self.lam)  # Algorithm 1, w as received
        v, epochs = tree.unprefixed(PERSONAL, own), self.personal_epochs or self.epochs
        v = self.train(near, v, data, stage="personal", epochs=epochs)
        w = self.train(self.loss, down, data)
        return w, tree.prefixed(PERSONAL, v)

    def before_training(self, down: Parts, own: Parts) -> Parts:
        return {**own, **tree.prefixed(PERSONAL, down)}
