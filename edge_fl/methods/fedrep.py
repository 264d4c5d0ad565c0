"""FedRep: clients share an extractor and have personal heads; each trains first its head, then the extractor under the frozen head.

The head h_i is trained on the frozen extractor f, both with the cross-entropy ℓ. The server averages the extractors, weighted by samples
(the contract's default `aggregate`). In final personalisation clients may refit their heads on the final extractor.

    stage 1, `head_epochs`:  h_i ← argmin_h ℓ(h(f^t(x)), y), starting from the client's last h_i
    stage 2, `epochs`:       f_i ← argmin_f ℓ(h_i(f(x)), y), starting from the received f^t
    server:                  f^{t+1} = Σ_i p_i f_i,  p_i = n_i / Σ_j n_j

Source: L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021 (Algorithm 1).
"""

from dataclasses import dataclass

from edge_fl.learn.batches import Batches
from edge_fl.learn.network.part import personal, shared
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract.method import HeadTier, Method, hyper


@dataclass(frozen=True)
class FedRep(Method):
    """Shared extractor, personal head; `epochs` is the number of epochs of stage 2."""

    head_epochs: int = hyper(
        4, "epochs on the head, before the extractor", low=0, source="5 in all, official code [C]"
    )
    final_head_epochs: int = hyper(
        0, "epochs on the head in final personalisation", low=0, source="10 or more, official code [C]"
    )

    title = "FedRep"
    citation = "Collins et al., ICML 2021"
    family = "shared extractor"
    grid = {"head_epochs": (1, 4, 10)}
    parts = {"extractor": shared(), "head": personal()}
    head_tier = HeadTier("adapted", "head")
    deviations = (
        "the official code refits heads before it tests, here `final_head_epochs`, 0 by default; between rounds a head is tested on the"
        " averaged extractor as its client left it"
    )

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        head = self._fit_head(down["extractor"], own["head"], data, self.head_epochs)  # stage 1
        extractor = self.fit_extractor(down["extractor"], head, data, stage="s2")  # stage 2
        return {"extractor": extractor}, {"head": head}

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        return {}, {"head": self._fit_head(down["extractor"], own["head"], data, self.final_head_epochs)}

    def _fit_head(self, extractor: Params, head: Params, data: Batches, epochs: int) -> Params:
        """Train the head on features z = f(x), which are computed once because the extractor is frozen."""
        z = data.features(self.net.extractor, extractor)
        return self.train(self.head_loss, head, z, stage="s1", epochs=epochs)
