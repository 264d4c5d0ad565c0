"""FedDyn: FedAvg in which each client's loss is changed from round to round, so that its minimum moves to that of the mean loss.

h_i is the gradient of client i's loss at its last model. It is kept as d_i = -h_i/α, the sum of the client's changes; d is the mean of
d_i over clients.

    w_i ← argmin_w ℓ(w) - <h_i, w> + α/2 ||w - w^t||² = argmin_w ℓ(w) + α/2 ||w - (w^t - d_i)||² + …    Eq. 1
    d_i ← d_i + w_i - w^t
    server: w^{t+1} = mean w_i + d

Source: D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama, "Federated Learning Based on Dynamic
Regularization", ICLR 2021.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update, noted, remembered, weighted_mean
from edge_fl.learn.batches import Batches
from edge_fl.learn.network.part import personal, shared
from edge_fl.learn.objective import pulled
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import SHARED_MODEL, HeadTier, Method, hyper

DRIFT, OWN = "drift_", "own_drift_"


@dataclass(frozen=True)
class FedDyn(Method):
    """Shared model; personal is d_i (`own_drift_`). The server's memory is d (`drift_`) and `counted`, the clients in it."""

    alpha: float = hyper(0.01, "α, weight of the regularisation", low=1e-6, source="official code [C]")

    title = "FedDyn"
    citation = "Acar et al., ICLR 2021"
    family = "global model"
    grid = {"alpha": (0.001, 0.01, 0.1)}
    has_global = True
    uniform = True
    sends = receives = ("extractor", "head")
    memory = dict.fromkeys(("drift_extractor", "drift_head", "counted"), shared())
    parts = {**SHARED_MODEL, **memory, "own_drift_extractor": personal(), "own_drift_head": personal()}
    head_tier = HeadTier("adapted", "head", extras=("head",))
    deviations = (
        "d is the mean over the clients that took part so far (published: over all, known beforehand);"
        " α is the same for all sizes of clients (in the code α n̄/n_i)"
    )

    def init_shared(self) -> Parts:
        return {**super().init_shared(), **tree.prefixed(DRIFT, self.net.zeros()), "counted": {}}

    def init_own(self, client: str) -> Parts:
        return tree.prefixed(OWN, self.net.zeros())

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        drift, received = tree.unprefixed(OWN, own), tree.parameters(down)
        d = tree.parameters(drift)
        anchor = tree.replaced(down, {path: t - d[path] for path, t in received.items()})
        w = self.train(pulled(self.loss, anchor, self.alpha), down, data)  # Eq. 1
        moved = {path: d[path] + (t - received[path]) for path, t in tree.parameters(w).items()}
        return w, tree.prefixed(OWN, tree.replaced(drift, moved))

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        clients: list[str] = []
        mean = weighted_mean(shared, noted(updates, clients), uniform=True)
        counted = remembered(shared["counted"], clients, like=mean)
        kept, share = (len(each) / max(len(counted), 1) for each in (shared["counted"], clients))
        model, drift = {name: mean[name] for name in SHARED_MODEL}, tree.unprefixed(DRIFT, shared)
        old, d = tree.parameters({name: shared[name] for name in SHARED_MODEL}), tree.parameters(drift)
        moved = {
            path: (kept * d[path] + share * (t - old[path]), t) for path, t in tree.parameters(model).items()
        }
        model = tree.replaced(model, {path: t + d for path, (d, t) in moved.items()})
        drift = tree.replaced(drift, {path: d for path, (d, _) in moved.items()})
        return {**mean, **model, **tree.prefixed(DRIFT, drift), "counted": counted}
