"""FedBABU: only the extractor ("body") is trained and averaged; the head keeps its random initial values until the end.

In final personalisation each client fine-tunes head, extractor or both on its data.

Source: J. Oh, S. Kim, S.-Y. Yun, "FedBABU: Towards Enhanced Representation for Federated Image Classification", ICLR 2022.
"""

from dataclasses import dataclass

from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.losses import cross_entropy
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import SHARED_MODEL, TUNED, HeadTier, Method, hyper

SCOPES = {"full": ("extractor", "head"), "head": ("head",), "body": ("extractor",)}


@dataclass(frozen=True)
class FedBABU(Method):
    """Shared extractor; the head is drawn from the seed by server and clients, and sent only to head-only devices."""

    ft_epochs: int = hyper(5, "epochs of fine-tuning", low=0, source="official code [C]; 10 in PFLlib")
    ft_lr: float = hyper(
        0.01, "learning rate of fine-tuning, momentum 0.9 [C]", low=0, source="as for +FT [D]"
    )
    ft_scope: str = hyper("full", "what is tuned", choices=tuple(SCOPES), source="official code [C]")

    title = "FedBABU"
    citation = "Oh et al., ICLR 2022"
    family = "shared extractor"
    grid = {"ft_epochs": (5, 10), "ft_lr": (0.01, 0.1)}
    has_global = True
    parts = SHARED_MODEL
    sends = ("extractor",)
    fixed_head = True
    head_tier = HeadTier(
        "native",
        "head, fine-tuned from its random start",
        extras=("head",),
        way="tuned",
        numbers={"epochs": "ft_epochs", "lr": "ft_lr", "momentum": 0.9, "weight_decay": 0.0, "min_steps": 0},
    )

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        f = self.fit_extractor(down["extractor"], self.net.head.init(), data, stage="train")
        return {"extractor": f}, own

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, scope = self.net, SCOPES[self.ft_scope]
        start = {"extractor": down["extractor"], "head": net.head.init()}
        extractor = net.extractor if "extractor" in scope else net.extractor.frozen

        def loss(tuned: Parts, batch: Batch) -> Tensor:
            w = {**start, **tuned}
            return cross_entropy(net.head(w["head"], extractor(w["extractor"], batch.x)), batch.y, batch.mask)

        optimiser, tuned = Sgd(self.ft_lr, momentum=0.9), {name: start[name] for name in scope}
        tuned = fit(loss, tuned, data, stage="ft", epochs=self.ft_epochs, optimiser=optimiser)
        return {}, {**own, **tree.prefixed(TUNED, {**start, **tuned})}
