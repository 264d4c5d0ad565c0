"""FedPer: the last layers are personal; clients train them jointly with the shared layers below, which the server averages by samples.

Source: M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary, "Federated Learning with Personalization Layers", arXiv:1912.00818
(2019).
"""

from dataclasses import dataclass

from edge_fl.learn import tree
from edge_fl.learn.batches import Batches
from edge_fl.learn.network.part import personal, shared
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import HeadTier, Method, hyper


@dataclass(frozen=True)
class FedPer(Method):
    """Shared extractor, personal head; with more personal layers, the extractor's last layers are personal too."""

    personal_layers: int = hyper(1, "K_P, from the last: 0 is FedAvg, all is Local", low=0, source="[P]")

    title = "FedPer"
    citation = "Arivazhagan et al., arXiv:1912.00818 (2019)"
    family = "shared extractor"
    grid = {"personal_layers": (1, 2)}
    parts = {"extractor": shared(), "head": personal()}
    head_tier = HeadTier("adapted", "head")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.personal_layers == 0:
            object.__setattr__(self, "parts", {"extractor": shared(), "head": shared()})
        if self.personal_layers > 1:  # the server has no complete extractor to export
            object.__setattr__(self, "exports", ())
            object.__setattr__(self, "head_tier", HeadTier("none"))

    def init_shared(self) -> Parts:
        return self._split(self._start())[1]

    def init_own(self, client: str) -> Parts:
        return self._split(self._start())[0]

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        w, stage = tree.merge(down, own), "train" if down else "personal"
        w = self.train(self.loss, w, data, stage=stage)
        own, up = self._split(w)
        return up, own

    def _start(self) -> Parts:
        return {"extractor": self.net.extractor.init(), "head": self.net.head.init()}

    def _split(self, w: Parts) -> tuple[Parts, Parts]:
        return tree.split(w, self.net.top(self.personal_layers))
