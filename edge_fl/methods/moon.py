"""MOON: FedAvg with a contrastive term that pulls a client's features towards the global model's and away from its own previous ones.

The features are z, those of the received global model z_g, and those of the client's previous model z_p.

    min ℓ - μ mean log[ exp(cos(z, z_g)/τ) / (exp(cos(z, z_g)/τ) + exp(cos(z, z_p)/τ)) ]    Eqs. 3 and 4

Source: Q. Li, B. He, D. Song, "Model-Contrastive Federated Learning", CVPR 2021.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.losses import model_contrast
from edge_fl.learn.network.part import history, personal, projection, shared
from edge_fl.learn.objective import CrossEntropy
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import HeadTier, Method, hyper

PREVIOUS = "previous_"


@dataclass(frozen=True)
class MOON(Method):
    """Shared extractor, projection and head; personal are the extractor and projection after the client's last participation."""

    mu: float = hyper(
        5.0, "weight of the contrastive term; 0 is FedAvg", low=0, source="CIFAR-10; 1 for CIFAR-100 [P]"
    )
    temperature: float = hyper(0.5, "τ", low=1e-3, source="[P]")
    moon_proj: int = hyper(
        0, "width of a 2-layer projection before the head; 0: none, as in PFLlib", low=0, source="256 [P]"
    )

    title = "MOON"
    citation = "Li et al., CVPR 2021"
    family = "global model"
    grid = {"moon_proj": (0, 256), "mu": (0.1, 1.0, 5.0, 10.0)}
    deviations = "no projection by default, because small networks learn slower with it; published: two layers (moon_proj = 256)"
    has_global = True
    parts = {
        "extractor": shared(),
        "projection": shared(lambda net, method: projection(net, method.moon_proj)),
        "head": shared(lambda net, method: nn.Linear(method.moon_proj or net.feature_dim, net.classes)),
        "previous_extractor": personal(like="extractor"),
        "previous_projection": personal(like="projection"),
        "history": history(trained=0.0),
    }
    exports = ("extractor", "projection")
    head_tier = HeadTier("adapted", "head", extras=("head",))

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net = self.net
        previous = tree.where(own["history"]["trained"], tree.unprefixed(PREVIOUS, own), down)

        parts = {name: net.parts[name] for name in ("extractor", "projection", "head")}
        loss = CrossEntropy(parts, on_features=self._contrast(down, previous, data) if self.mu else None)
        w = self.train(loss, down, data)
        trained = {"history": tree.map(torch.ones_like, own["history"])}
        return w, {**tree.prefixed(PREVIOUS, {name: w[name] for name in previous}), **trained}

    def _contrast(self, down: Parts, previous: Parts, data: Batches) -> Callable[[Tensor, Batch], Tensor]:
        """μ times the contrastive term of Eq. 4; both fixed models see each image once in a round."""
        received, last = tree.map(data.copy, down), tree.map(data.copy, previous)
        near = data.once(lambda x: self.features(received, x))
        far = data.once(lambda x: self.features(last, x))

        def contrast(z: Tensor, batch: Batch) -> Tensor:
            return self.mu * model_contrast(z, near(batch), far(batch), self.temperature, batch.mask)

        return contrast

    def features(self, parts: Parts, x: Tensor) -> Tensor:
        z = self.net.extractor.frozen(parts["extractor"], x)
        return self.net.projection.frozen(parts["projection"], z)
