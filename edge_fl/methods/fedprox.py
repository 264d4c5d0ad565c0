"""FedProx: FedAvg with a proximal term that penalises the distance to the received model w^t.

Optionally some clients run fewer epochs.

    w_i ← argmin_w ℓ(w) + μ/2 ||w - w^t||²    Eq. 2

Source: T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020.
"""

from dataclasses import dataclass

from edge_fl.learn.batches import Batches
from edge_fl.learn.objective import pulled
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import SHARED_MODEL, HeadTier, Method, hyper


@dataclass(frozen=True)
class FedProx(Method):
    """Shared extractor and head; no personal part."""

    mu: float = hyper(
        0.1,
        "weight of the proximal term; 0 is FedAvg",
        low=0,
        source="FedCRC [P]; else {0.001, 0.01, 0.1, 1}",
    )
    stragglers: float = hyper(
        0.0, "probability that a client runs only 1 to E epochs in a round", low=0, high=1, source="[P]"
    )

    title = "FedProx"
    citation = "Li et al., MLSys 2020"
    family = "global model"
    grid = {"mu": (0.001, 0.01, 0.1, 1.0)}
    has_global = True
    parts = SHARED_MODEL
    head_tier = HeadTier("adapted", "head", extras=("head",))

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        loss = pulled(self.loss, down, self.mu)  # Eq. 2
        data = data.with_stragglers(self.stragglers)
        return self.train(loss, down, data), own
