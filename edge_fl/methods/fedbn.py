"""FedBN: X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR
2021.

FedAvg in which all BatchNorm parameters and statistics stay on the clients and adapt the model to each client's features.
"""

from dataclasses import dataclass
from typing import ClassVar

from edge_fl.learn.batches import Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.hyper import hyper
from edge_fl.methods.contract.method import SHARED_MODEL, BatchNorm, HeadTier, Method


@dataclass(frozen=True)
class FedBN(Method):
    """Shared extractor and head, all BatchNorm personal."""

    weighting: str = hyper(
        "uniform", "equal client weights, or by samples", choices=("uniform", "n"), source="[C]"
    )

    title: ClassVar = "FedBN"
    citation: ClassVar = "Li et al., ICLR 2021"
    family: ClassVar = "global model, personal BatchNorm"
    parts: ClassVar = SHARED_MODEL
    batch_norm: ClassVar = BatchNorm.LOCAL_BN
    uniform: ClassVar = True
    head_tier: ClassVar = HeadTier("adapted", "head on averaged BatchNorm", extras=("head",))

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "uniform", self.weighting == "uniform")

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        return fit(self.loss, down, data, stage="train", epochs=self.epochs, optimiser=self.optimiser), own
