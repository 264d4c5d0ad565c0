"""pFedMe: every client trains a personal model that is regularised towards its copy of the global model, and the copy towards it.

On every batch, K steps bring the personal model θ near the minimum of the regularised loss, then the client's copy of w takes a step
towards θ. The server moves w by β towards the mean of the clients' copies, weighted by samples.

    θ ← θ - η_p ∇(ℓ(θ) + λ/2 ||θ - w||²), K times     Eqs. 3 and 7
    w ← w - η λ (w - θ)                               Eq. 4
    server: w ← (1 - β) w + β Σ_i p_i w_i

Source: C. T. Dinh, N. H. Tran, T. D. Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update, stepped, weighted_mean
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import descend, scan
from edge_fl.learn.network.part import history
from edge_fl.learn.objective import pulled
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import (
    PERSONAL,
    PERSONAL_MODEL,
    SHARED_MODEL,
    HeadTier,
    Method,
    Numbers,
    hyper,
)

TIER: Numbers = {"pull": "lam", "lr": "inner_lr", "momentum": 0.0}


@dataclass(frozen=True)
class PFedMe(Method):
    """Shared model w, personal model θ; `optimiser` steps w along λ(w - θ), plain SGD trains θ."""

    lam: float = hyper(15.0, "λ, pull of θ towards w", low=0, source="official code [C]")
    inner_steps: int = hyper(5, "K, steps on θ per batch", low=0, source="official code [C]")
    inner_lr: float = hyper(
        0.03, "η_p, learning rate of θ", low=0, source="0.01 to 0.1 [C]; 0.09 diverges [D]"
    )
    beta: float = hyper(1.0, "β, server's step to the mean; 0: none", low=0, high=2, source="1 or 2 [C]")
    batches: int = hyper(0, "R, batches per round; 0: those of `epochs`", low=0, source="official 20 [C]")

    title = "pFedMe"
    citation = "Dinh et al., NeurIPS 2020"
    family = "global and personal models"
    grid = {"lam": (5.0, 15.0, 30.0), "beta": (1.0, 2.0)}
    has_global = True
    parts = {**SHARED_MODEL, **PERSONAL_MODEL, "history": history(trained=0.0)}
    head_tier = HeadTier("adapted", "head, pulled to the global one", ("head",), way="tuned", numbers=TIER)
    deviations = "no weight decay on θ (0.001 in code only); w takes θ's BatchNorm statistics"

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        def step(carry: tuple[Parts, Parts, Any], batch: Batch) -> tuple[Parts, Parts, Any]:
            w, theta, state = carry
            envelope = pulled(self.loss, w, self.lam)  # Eq. 3
            for _ in range(self.inner_steps):  # Eq. 7
                theta, _ = descend(envelope, theta, {}, batch, Sgd(self.inner_lr))
            held, near = tree.parameters(w), tree.parameters(theta)
            pull = {path: self.lam * (t - near[path]) for path, t in held.items()}  # Eq. 4
            held, state = self.optimiser.step(held, pull, state)
            return tree.replaced(theta, held), theta, state

        carry, norm = (down, down, self.optimiser.init(tree.parameters(down))), tree.has_buffers(down)
        epochs, limit = self.batches or self.epochs, self.batches
        w, theta, _ = scan(step, carry, data, stage="train", epochs=epochs, norm=norm, limit=limit)
        took_part = {"history": tree.map(torch.ones_like, own["history"])}
        return w, {**tree.prefixed(PERSONAL, theta), **took_part}

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        mean = weighted_mean(shared, updates)
        return {name: stepped(old, mean[name], self.beta) for name, old in shared.items()}
