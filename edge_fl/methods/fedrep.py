"""FedRep: L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai, "Exploiting Shared Representations for Personalized Federated
Learning", ICML 2021. Each round a client fits its personal head on the frozen extractor, then the extractor under the frozen head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from edge_fl.learn.batches import Batches
from edge_fl.learn.network.part import personal, shared
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract.hyper import hyper
from edge_fl.methods.contract.method import HeadTier, Method


@dataclass(frozen=True)
class FedRep(Method):
    """Shared extractor, personal head; `epochs` are the extractor's."""

    head_epochs: int = hyper(
        4, "local epochs on the head, before the extractor's", low=0, source="5 in all, official code [C]"
    )
    final_head_epochs: int = hyper(
        0, "epochs that refit the head on the final extractor", low=0, source="10 or more, official code [C]"
    )

    title: ClassVar = "FedRep"
    citation: ClassVar = "Collins et al., ICML 2021"
    family: ClassVar = "shared extractor"
    parts: ClassVar = {"extractor": shared(), "head": personal()}
    head_tier: ClassVar = HeadTier("native", "head, the method's first stage")

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        head = self._fit_head(down["extractor"], own["head"], data, self.head_epochs)
        extractor = self.fit_extractor(down["extractor"], head, data, stage="s2")
        return {"extractor": extractor}, {"head": head}

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        return {}, {"head": self._fit_head(down["extractor"], own["head"], data, self.final_head_epochs)}

    def _fit_head(self, extractor: Params, head: Params, data: Batches, epochs: int) -> Params:
        z = data.features(self.net.extractor, extractor)
        return self.fit_head(head, z, stage="s1", epochs=epochs)
