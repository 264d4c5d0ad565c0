"""FedCGS: on a pretrained extractor, the server computes a head in closed form from sums that each client sends once.

The extractor stays as it is; the sums are over the client's features. In the personalised variant each client then trains its own model and
pulls its features to the global class means.

    client  A_i = Σ z zᵀ,  n_{i,c},  μ_{i,c} = mean of z = f(x) over class c
    server  μ_c = Σ_i n_{i,c} μ_{i,c} / n_c,  μ = Σ_c n_c μ_c / n,  S = (Σ_i A_i - n μ μᵀ)/(n - 1)
            W = [μ_c] (S + γ tr(S)/d I)⁻¹,  b_c = -½ μ_c·W_c + log n_c/n
    final   (f_i, h_i) ← argmin ℓ(h(f(x)), y) + λ mean ||f(x) - μ_y||²/d, from f and a new head

Source: Z. Guan, Y. Zhou, X. Gu, "Capture Global Feature Statistics for One-Shot Federated Learning", AAAI 2025.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update, prototypes
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.losses import cross_entropy, one_hot, squared_error
from edge_fl.learn.network.part import shared
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract.method import TUNED, HeadTier, Method, hyper


@dataclass(frozen=True)
class FedCGS(Method):
    """Shared extractor, head, class means and sums; the server's memory `counted` names the clients in them."""

    lam: float = hyper(
        1.0, "λ, pull of a feature to its class's mean; 0: none", low=0, source="not confirmed [D]"
    )
    ridge: float = hyper(
        1e-3, "γ, added to the diagonal of S, relative to its mean", low=0, source="[D]; 0 in the code [C]"
    )
    ft_epochs: int = hyper(10, "epochs of the final training", low=0, source="not confirmed [D]")

    title = "FedCGS"
    citation = "Guan et al., AAAI 2025"
    family = "fixed extractor, statistics"
    grid = {"lam": (0.1, 1.0, 10.0)}
    has_global = True
    receives = ("extractor", "head", "prototypes")
    sends = ("prototypes", "sums")
    parts = dict.fromkeys((*receives, "sums", "counted"), shared())
    head_tier = HeadTier(
        "adapted",
        "head, after its statistics",
        extras=("head",),
        updates={"prototypes": "class_means", "sums": "ridge_sums"},
    )
    deviations = "clients may come in any round, and count once; the personalised variant is not in the code"

    def init_shared(self) -> Parts:
        d = self.net.feature_dim
        sums = {"gram": torch.zeros(d, d), "moment": torch.zeros(d, self.net.classes)}
        return {**super().init_shared(), "sums": sums, "counted": {}}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        z = data.features(self.net.extractor, down["extractor"])
        x = torch.where(z.y[:, None] >= 0, z.x, 0.0)  # a label below 0 is padding
        sums = {"gram": x.T @ x, "moment": x.T @ one_hot(z.y, data.classes)}
        return {"prototypes": prototypes(z), "sums": sums}, own

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        counted, totals = dict(shared["counted"]), tree.map(Tensor.double, shared["sums"])
        count = shared["prototypes"]["count"].double()
        for update in updates:
            if update.client not in counted and set(self.sends) <= update.parts.keys():
                counted[update.client] = torch.ones((), device=count.device)
                totals = tree.map(torch.add, totals, update.parts["sums"])
                count = count + update.parts["prototypes"]["count"]
        known = {"mean": (totals["moment"] / count.clamp(min=1)).T, "count": count}
        new = {"head": closed_form(known, totals["gram"], self.ridge), "prototypes": known, "sums": totals}
        as_sent = tree.map(lambda t: t.float().contiguous(), new if counted else {})
        return {**shared, **as_sent, "counted": counted}

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, known = self.net, down["prototypes"]

        def loss(w: Parts, batch: Batch) -> Tensor:
            z = net.extractor(w["extractor"], batch.x)
            target = torch.where(known["count"][batch.y, None] > 0, known["mean"][batch.y], z.detach())
            pull = squared_error(z, target, batch.mask)
            return cross_entropy(net.head(w["head"], z), batch.y, batch.mask) + self.lam * pull

        w = {"extractor": down["extractor"], "head": tree.to_device(net.head.init(), data.x.device)}
        w = self.train(loss, w, data, stage="ft", epochs=self.ft_epochs)
        return {}, {**own, **tree.prefixed(TUNED, w)}


def closed_form(known: Params, gram: Tensor, ridge: float) -> Params:
    """The head from class means μ_c [C, d] with their counts and the sum of z zᵀ [d, d]."""
    mean, count = known["mean"], known["count"]
    total = count.sum().clamp(min=2)
    centre = count @ mean / total
    covariance = (gram - total * torch.outer(centre, centre)) / (total - 1)
    scale = (covariance.trace() / len(gram)).clamp(min=1e-12)  # features of any size get the same head
    covariance = covariance + ridge * scale * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    weight = torch.linalg.solve(covariance, mean.T).T
    return {"weight": weight, "bias": -0.5 * (mean * weight).sum(1) + (count.clamp(min=1e-6) / total).log()}
