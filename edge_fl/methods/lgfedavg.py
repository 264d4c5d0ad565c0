"""LG-FedAvg: the reverse of FedPer; every client has its own extractor, and the last layers are shared.

All layers are trained jointly.

Source: P. P. Liang, T. Liu, L. Ziyin, N. B. Allen, R. P. Auerbach, D. Brent, R. Salakhutdinov, L.-P. Morency, "Think Locally, Act Globally:
Federated Learning with Local and Global Representations", arXiv:2001.01523 (2020).
"""

from dataclasses import dataclass

from edge_fl.learn import tree
from edge_fl.learn.batches import Batches
from edge_fl.learn.network.part import personal, shared
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import HeadTier, Method, hyper


@dataclass(frozen=True)
class LGFedAvg(Method):
    """Personal extractor, shared head; with more shared layers, the extractor's last layers are shared too."""

    num_layers_keep: int = hyper(1, "shared layers, counted from the last", low=1, source="official code [C]")

    title = "LG-FedAvg"
    citation = "Liang et al., arXiv:2001.01523 (2020)"
    family = "shared head"
    grid = {"num_layers_keep": (1, 2)}
    parts = {"extractor": personal(), "head": shared()}
    exports = ()
    head_tier = HeadTier("none")
    deviations = (
        "weighted mean and random initial values; official code: unweighted, from a model trained by FedAvg"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers_keep > 1:
            object.__setattr__(self, "parts", {"extractor": shared(), "head": shared()})

    def init_shared(self) -> Parts:
        return self._split(self._start())[0]

    def init_own(self, client: str) -> Parts:
        return self._split(self._start())[1]

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        w = tree.merge(down, own)
        return self._split(self.train(self.loss, w, data))

    def _start(self) -> Parts:
        return {"extractor": self.net.extractor.init(), "head": self.net.head.init()}

    def _split(self, w: Parts) -> tuple[Parts, Parts]:
        return tree.split(w, self.net.top(self.num_layers_keep))
