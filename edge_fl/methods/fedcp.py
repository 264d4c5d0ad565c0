"""FedCP: a small shared network (the policy) splits every feature of an image between a personal head and the frozen global one.

Clients train extractor, policy and personal head h_i under the frozen global head h^t; the features stay close to those of the received
extractor f^t.

    (a, b) = softmax(policy(z ⊙ v/||v||)),  a + b = 1,  logits = h_i(a ⊙ z) + h^t(b ⊙ z)    Eqs. 4 to 8
    min CE(logits) + λ MMD²(f(x), f^t(x))                                                   Eq. 9
    sent as head: (h_i + h^t)/2

Source: J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan, "FedCP: Separating Feature Information for Personalized Federated
Learning via Conditional Policy", KDD 2023.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edge_fl.learn.aggregation.mean import lerp
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.losses import cross_entropy, mmd, unit
from edge_fl.learn.network.part import Net, personal, shared
from edge_fl.learn.random import gumbel, key_of, uniform
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import HeadTier, Method, hyper
from edge_fl.seeds import seed_for


def _policy(net: Net, method: "FedCP") -> nn.Module:
    d = net.feature_dim
    return nn.Sequential(nn.Linear(d, 2 * d), nn.LayerNorm(2 * d), nn.ReLU(), nn.Unflatten(1, (2, d)))


@dataclass(frozen=True)
class FedCP(Method):
    """Shared extractor, global head and policy; personal head and its context v, the sum of its rows after the last round."""

    lam: float = hyper(1.0, "λ, weight of the MMD to the received extractor", low=0, source="PFLlib [C]")
    gumbel: bool = hyper(False, "Gumbel noise on the policy in training", source="code only; softmax [P]")

    title = "FedCP"
    citation = "Zhang et al., KDD 2023"
    family = "shared extractor, two heads"
    grid = {"lam": (0.0, 1.0, 5.0)}
    parts = {
        "extractor": shared(),
        "head": shared(),
        "policy": shared(_policy),
        "personal_head": personal(like="head"),
        "context": personal(),
    }
    head_tier = HeadTier(
        "adapted", "head behind the frozen policy", ("head", "policy"), {"head": "half_head"}, way="gated"
    )

    def init_own(self, client: str) -> Parts:
        key = key_of(seed_for(self.net.seed, "init.context", client=client))
        return {**super().init_own(client), "context": {"v": uniform(key, self.net.feature_dim)}}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        extractor, fixed = self.net.extractor, {"head": down["head"], "context": own["context"]}

        def loss(w: Parts, batch: Batch) -> Tensor:
            z = extractor(w["extractor"], batch.x)
            noise = gumbel(batch.key, len(z), 2, z.shape[1]) if self.gumbel else 0.0
            error = cross_entropy(self._logits({**w, **fixed}, z, noise), batch.y, batch.mask)
            received = extractor.frozen(down["extractor"], batch.x)
            return error + self.lam * mmd(z, received, batch.mask)  # Eq. 9

        start = {name: params for name, params in {**down, **own}.items() if name not in fixed}
        w = self.train(loss, start, data)
        head = w["personal_head"]
        up = {"extractor": w["extractor"], "policy": w["policy"], "head": lerp(head, down["head"], 0.5)}
        return up, {"personal_head": head, "context": {"v": head["weight"].sum(0)}}

    def after_training(self, down: Parts, up: Parts) -> Parts:
        return {**down, **up, "head": down["head"]}  # what is sent is half the personal head

    def _logits(self, parts: Parts, z: Tensor, noise: Tensor | float = 0.0) -> Tensor:
        """h_i(a ⊙ z) + h^t(b ⊙ z), the global head frozen (Eqs. 4 to 8)."""
        policy = self.net.policy(parts["policy"], z * unit(parts["context"]["v"])) + noise
        a, b = torch.softmax(policy, dim=1).unbind(1)
        return self.net.head(parts["personal_head"], a * z) + self.net.head.frozen(parts["head"], b * z)

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        return self._logits(parts, self.features(parts, x))
