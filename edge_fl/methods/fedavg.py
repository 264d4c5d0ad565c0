"""FedAvg: B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017.

Every client trains the whole model on its data for `epochs`; the server averages the models, weighted by samples: w ← Σ_i p_i w_i.
"""

from dataclasses import dataclass
from typing import ClassVar

from edge_fl.learn.batches import Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import SHARED_MODEL, HeadTier, Method


@dataclass(frozen=True)
class FedAvg(Method):
    """Shared extractor and head; no personal part."""

    title: ClassVar = "FedAvg"
    citation: ClassVar = "McMahan et al., AISTATS 2017"
    family: ClassVar = "global model"
    has_global: ClassVar = True
    parts: ClassVar = SHARED_MODEL
    head_tier: ClassVar = HeadTier("adapted", "head", extras=("head",))

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        return fit(self.loss, down, data, stage="train", epochs=self.epochs, optimiser=self.optimiser), own
