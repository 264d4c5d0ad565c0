"""APFL: besides the model of FedAvg, w, every client trains a model v of its own, and predicts with a mixture of both.

The loss of the mixture v̄ trains v and the weight α, which thus says how much of its own model suits the client.

    w ← w - η ∇ℓ(w)
    v ← v - η ∇_v ℓ(v̄),  v̄ = α v + (1 - α) w     Algorithm 1
    α ← clip(α - η <∇ℓ(v̄), v - w>, 0, 1)

Source: Y. Deng, M. M. Kamani, M. Mahdavi, "Adaptive Personalized Federated Learning", arXiv:2003.13461 (2020).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import apply_gradient, descend, gradient, scan
from edge_fl.learn.network.part import history
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import PERSONAL, PERSONAL_MODEL, SHARED_MODEL, HeadTier, Method, hyper

Carry = tuple[Parts, Parts, Tensor, Any, Any]  # w, v, α, optimiser states of w and v


@dataclass(frozen=True)
class APFL(Method):
    """Shared model w; personal are v and α, in the client's history."""

    alpha: float = hyper(0.5, "α at the start; 0 is FedAvg", low=0, high=1, source="0.25 to 0.75 [P]")
    adaptive: bool = hyper(True, "α is trained", source="[P]")

    title = "APFL"
    citation = "Deng et al., arXiv:2003.13461 (2020)"
    family = "global and personal models"
    grid = {"alpha": (0.25, 0.5, 0.75), "adaptive": (False, True)}
    has_global = True
    measures = ("apfl.alpha",)
    parts = {**SHARED_MODEL, **PERSONAL_MODEL, "history": history(trained=0.0, alpha=0.5)}
    head_tier = HeadTier("adapted", "head", extras=("head",))
    deviations = (
        "a client's v starts from the w that it first receives; α is trained on every batch, without decay;"
        " the official code mixes logits, and trains α once a round with a decay of 0.02"
    )

    def init_own(self, client: str) -> Parts:
        start = {"trained": torch.tensor(0.0), "alpha": torch.tensor(float(self.alpha))}
        return {**super().init_own(client), "history": start}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        def step(carry: Carry, batch: Batch) -> Carry:
            w, v, alpha, of_w, of_v = carry
            w, of_w = descend(self.loss, w, of_w, batch, self.optimiser)

            def loss(p: Parts, batch: Batch) -> Tensor:
                return self.loss(mixed({name: p[name] for name in v}, w, p["mix"]["alpha"]), batch)

            grads = gradient(loss, {**v, "mix": {"alpha": alpha}}, batch)
            v, of_v = apply_gradient(v, grads, of_v, self.optimiser)
            if self.adaptive:
                alpha = (alpha - self.optimiser.lr * grads["mix", "alpha"]).clamp(0, 1)
            return w, v, alpha, of_w, of_v

        v, state = self._personal(down, own), self.optimiser.init(tree.parameters(down))
        start, norm = (down, v, own["history"]["alpha"], state, state), tree.has_buffers(down)
        w, v, alpha, _, _ = scan(step, start, data, stage="train", epochs=self.epochs, norm=norm)
        past = {"trained": torch.ones_like(alpha), "alpha": alpha}
        return w, {**tree.prefixed(PERSONAL, v), "history": past}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        w = {name: parts[name] for name in SHARED_MODEL}
        return self.classify(mixed(self._personal(w, parts), w, parts["history"]["alpha"]), x)

    def measure(self, parts: Parts, data: Batches) -> dict[str, Tensor]:
        return {"apfl.alpha": parts["history"]["alpha"]}

    def _personal(self, w: Parts, own: Parts) -> Parts:
        """v; w for a client that never trained."""
        return tree.where(own["history"]["trained"], tree.unprefixed(PERSONAL, own), w)


def mixed(v: Parts, w: Parts, alpha: Tensor) -> Parts:
    """αv + (1 - α)w, with v's running statistics, which are measured on the mixture."""
    held = tree.parameters(w)
    between = {path: torch.lerp(held[path], t, alpha) for path, t in tree.parameters(v).items()}
    return tree.replaced(v, between)
