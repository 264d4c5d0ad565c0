"""GPFL: a shared network (the conditional valve) turns each feature into a global and a personal one, with a head for each.

The valve depends on a condition computed from shared embeddings e_c of the classes. The global feature is classified by its angle to the
embeddings and pulled to the received embedding of its class; the personal one is classified by the client's head h_i.

    v(z, q) = ReLU(z ⊙ (1 + γ(q)) + β(q)),  γ and β: Linear, ReLU, LayerNorm
    g = Σ_c e_c/C,  p_i = Σ_c n_{i,c}/n_i e_c,  both from the received embeddings e^t
    min ℓ(h_i(v(z, p_i)), y) - mean log softmax_c(cos(v(z, g), e_c))_y + λ ||v(z, g) - e^t_y|| + μ/2 (||v||² + ||e||²)

Source: J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, J. Cao, H. Guan, "GPFL: Simultaneously Learning Global and Personalized Feature
Information for Personalized Federated Learning", ICCV 2023.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.losses import cross_entropy, proximal, unit
from edge_fl.learn.network.part import personal, shared
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract.method import HeadTier, Method, hyper


class Valve(nn.Module):
    """γ(q) and β(q) for conditions q, [n, d] -> [n, 2, d]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gamma, self.beta = (
            nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.LayerNorm(dim)) for _ in range(2)
        )

    def forward(self, condition: Tensor) -> Tensor:
        return torch.stack((self.gamma(condition), self.beta(condition)), dim=1)


@dataclass(frozen=True)
class GPFL(Method):
    """Shared extractor, valve and class embeddings; personal head, and the client's shares of classes."""

    lam: float = hyper(
        0.01, "λ, pull to the received embedding", low=0, source="for CNNs; 1e-4 for ResNet-18 [C]"
    )
    mu: float = hyper(
        0.1, "μ, weight decay of valve and embeddings", low=0, source="for CNNs; 0 for ResNet-18 [C]"
    )

    title = "GPFL"
    citation = "Zhang et al., ICCV 2023"
    family = "shared extractor, conditional features"
    grid = {"lam": (0.001, 0.01, 0.1), "mu": (0.0, 0.1)}
    parts = {
        "extractor": shared(),
        "valve": shared(lambda net, _: Valve(net.feature_dim)),
        "embeddings": shared(lambda net, _: nn.Embedding(net.classes, net.feature_dim)),
        "personal_head": personal(like="head"),
        "shares": personal(),
    }
    head_tier = HeadTier("adapted", "head, without the valve")
    deviations = "conditions come from the received embeddings; the code takes the client's own ones and begins with zeros"

    def init_own(self, client: str) -> Parts:
        shares = {"classes": torch.full((self.net.classes,), 1 / self.net.classes)}
        return {**super().init_own(client), "shares": shares}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, received = self.net, down["embeddings"]["weight"]
        general, special = received.mean(0), own_shares(data) @ received

        def loss(w: Parts, batch: Batch) -> Tensor:
            z = net.extractor(w["extractor"], batch.x)
            mine, common = (self._valve(w["valve"], z, condition) for condition in (special, general))
            error = cross_entropy(net.personal_head(w["personal_head"], mine), batch.y, batch.mask)
            angles = unit(common) @ unit(w["embeddings"]["weight"]).T
            error = error + cross_entropy(angles, batch.y, batch.mask)
            away = torch.where(batch.real[:, None] > 0, common - received[batch.y], 0.0)
            decayed = {name: w[name] for name in ("valve", "embeddings")}
            decay = proximal(decayed, tree.map(torch.zeros_like, decayed), self.mu)
            distance: Tensor = torch.linalg.vector_norm(away)
            return error + self.lam * distance + decay

        start = {**down, "personal_head": own["personal_head"]}
        w = self.train(loss, start, data)
        own = {"personal_head": w.pop("personal_head"), "shares": {"classes": own_shares(data)}}
        return w, own

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        """A client that never took part learns its shares of classes."""
        return {}, {**own, "shares": {"classes": own_shares(data)}}

    def _valve(self, valve: Params, z: Tensor, condition: Tensor) -> Tensor:
        """v(z, q) for features z [N, d] and one condition q [d]."""
        gamma, beta = self.net.valve(valve, condition[None])[0]
        return torch.relu(z * (1 + gamma) + beta)

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        condition = parts["shares"]["classes"] @ parts["embeddings"]["weight"]
        z = self._valve(parts["valve"], self.features(parts, x), condition)
        return self.net.personal_head.frozen(parts["personal_head"], z)


def own_shares(data: Batches) -> Tensor:
    """The client's share of samples of each class [C]."""
    return data.counts / data.counts.sum()
