"""FedPAC: J. Xu, X. Tong, S.-L. Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR 2023.
Features are pulled to the global mean of their class; the server gives every client the mixture of heads that should err least on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from edge_fl.config import OptimiserConfig
from edge_fl.learn import simplex
from edge_fl.learn.aggregation.mean import Update, prototypes, spread, weighted_mean
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.losses import cross_entropy, squared_error
from edge_fl.learn.network.part import shared
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract.hyper import hyper
from edge_fl.methods.contract.method import HeadTier, Method, Numbers, Uploads


@dataclass(frozen=True)
class FedPAC(Method):
    """Shared extractor and prototypes; the server's memory `combined` holds each client's mixture of heads, `head` is the mean of all."""

    lam: float = hyper(1.0, "λ, pull of a feature to its class; 0: none", low=0, source="[P]")
    head_lr: float = hyper(0.1, "learning rate of the epoch on the head, momentum 0.5", low=0, source="[C]")

    title: ClassVar = "FedPAC"
    citation: ClassVar = "Xu et al., ICLR 2023"
    family: ClassVar = "shared extractor, heads mixed by the server"
    sends: ClassVar = ("extractor", "head", "prototypes", "spread")
    parts: ClassVar = dict.fromkeys((*sends, "combined"), shared())
    gives: ClassVar[Uploads] = {"head": "fitted_head", "prototypes": "class_means", "spread": "spread"}
    fits: ClassVar[Numbers] = {"lr": "head_lr", "momentum": 0.5, "epochs": 1}
    head_tier: ClassVar = HeadTier("native", "head", ("head", "prototypes"), gives, way="tuned", numbers=fits)
    usual_optimiser: ClassVar = OptimiserConfig("sgd", 0.01, momentum=0.5, weight_decay=5e-4)
    deviations: ClassVar = "a client that never took part gets the mean of the heads"

    def broadcast(self, shared: Parts, client: str) -> Parts:
        combined = shared.get("combined", {})
        head = {key: combined.get(f"{client}/{key}", t) for key, t in shared["head"].items()}
        return {"extractor": shared["extractor"], "head": head, "prototypes": shared["prototypes"]}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, known = self.net, down["prototypes"]["count"]
        z = data.features(net.extractor, down["extractor"])
        optimiser = Sgd(self.head_lr, 5e-4, momentum=0.5)
        head = fit(self.head_loss, down["head"], z, stage="s1", epochs=1, optimiser=optimiser)
        target = torch.where(known[:, None] > 0, down["prototypes"]["mean"], prototypes(z)["mean"])
        pull = self.lam * (known.sum() > 0)  # in round 1 nothing is known

        def loss(f: Params, batch: Batch) -> Tensor:
            features = net.extractor(f, batch.x)
            away = squared_error(features, target[batch.y], batch.mask)
            return cross_entropy(net.head.frozen(head, features), batch.y, batch.mask) + pull * away  # Eq. 7

        f = fit(loss, down["extractor"], data, stage="s2", epochs=self.epochs, optimiser=self.optimiser)
        means = prototypes(data.features(net.extractor, f))
        return {"extractor": f, "head": head, "prototypes": means, "spread": spread(z)}, own

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        heads, spreads = dict[str, Params](), list[Params]()

        def without_spreads() -> Iterator[Update]:
            for update in updates:
                if {"head", "spread"} <= update.parts.keys():
                    heads[update.client] = update.parts["head"]
                    spreads.append(update.parts["spread"])
                yield replace(update, parts={n: p for n, p in update.parts.items() if n != "spread"})

        mean, combined = weighted_mean(shared, without_spreads()), dict(shared.get("combined", {}))
        for client, head in zip(heads, simplex.combined([*heads.values()], spreads), strict=True):
            combined |= {f"{client}/{key}": t for key, t in head.items()}
        return {**mean, "combined": combined}
