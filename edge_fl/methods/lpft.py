"""LP-FT: FedAvg, after which every client adapts the global model in two steps: first the head alone, then the whole model.

The first step is linear probing, the second fine-tuning from there. With a fitted head the second step changes the extractor less than
fine-tuning from the global head does.

    lp:  h_i ← argmin_h ℓ(h(f(x)), y), from the global head h, f frozen
    ft:  (f_i, h_i) ← argmin ℓ(h(f(x)), y), from f and h_i

Source: M. Chen, H. Ghoukasian, R. Jin, Z. Wang, S. P. Karimireddy, X. Li, "A Closer Look at Personalized Fine-Tuning in Heterogeneous
Federated Learning", arXiv:2511.12695 (2025); the two steps are those of A. Kumar et al., ICLR 2022.
"""

from dataclasses import dataclass

from edge_fl.learn import tree
from edge_fl.learn.batches import Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import SHARED_MODEL, TUNED, HeadTier, Method, hyper


@dataclass(frozen=True)
class LPFT(Method):
    """Shared extractor and head; personal copies of both from the final personalisation."""

    lp_epochs: int = hyper(10, "epochs on the head", low=0, source="not confirmed [D]")
    lp_lr: float = hyper(0.1, "their learning rate, momentum 0.9", low=0, source="not confirmed [D]")
    ft_epochs: int = hyper(
        5, "epochs on the whole model; 0: linear probing", low=0, source="not confirmed [D]"
    )
    ft_lr: float = hyper(0.001, "their learning rate, momentum 0.9", low=0, source="not confirmed [D]")

    title = "LP-FT"
    citation = "Chen et al., arXiv:2511.12695 (2025)"
    family = "global model, then fine-tuned"
    grid = {"ft_lr": (0.0001, 0.001, 0.01)}
    has_global = True
    parts = SHARED_MODEL
    head_tier = HeadTier(
        "native",
        "head, the first step",
        extras=("head",),
        way="tuned",
        numbers={"epochs": "lp_epochs", "lr": "lp_lr", "momentum": 0.9, "weight_decay": 0.0, "min_steps": 0},
    )
    deviations = "its code was not available: epochs and learning rates are ours"

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        z = data.features(self.net.extractor, down["extractor"])
        probing, tuning = Sgd(self.lp_lr, momentum=0.9), Sgd(self.ft_lr, momentum=0.9)
        head = fit(self.head_loss, down["head"], z, stage="s1", epochs=self.lp_epochs, optimiser=probing)
        w = {"extractor": down["extractor"], "head": head}
        w = fit(self.loss, w, data, stage="ft", epochs=self.ft_epochs, optimiser=tuning)
        return {}, {**own, **tree.prefixed(TUNED, w)}
