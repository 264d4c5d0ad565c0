"""FedBN: FedAvg in which all BatchNorm parameters and statistics stay on the clients and adapt the model to each client's features.

Source: X. Li, M. Jiang, X. Zhang, M. Kamp, Q. Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR
2021.
"""

from dataclasses import dataclass

from edge_fl.methods.contract.method import SHARED_MODEL, BatchNorm, HeadTier, Method, hyper


@dataclass(frozen=True)
class FedBN(Method):
    """Shared extractor and head, all BatchNorm personal."""

    weighting: str = hyper(
        "uniform", "equal client weights, or by samples", choices=("uniform", "n"), source="[C]"
    )

    title = "FedBN"
    citation = "Li et al., ICLR 2021"
    family = "global model, personal BatchNorm"
    parts = SHARED_MODEL
    batch_norm = BatchNorm.LOCAL_BN
    uniform = True
    head_tier = HeadTier("adapted", "head on averaged BatchNorm", extras=("head",))

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "uniform", self.weighting == "uniform")
