"""Per-FedAvg: A. Fallah, A. Mokhtari, A. Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020. Clients learn a model that is good one gradient step later; every client takes that step at the
end, on its own data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import descend, gradient, scan
from edge_fl.learn.optimiser import Leaves, Sgd
from edge_fl.learn.part import shared
from edge_fl.learn.tree import Parts
from edge_fl.methods.hyper import hyper
from edge_fl.methods.method import HeadTier, Method

ADAPTED = "adapted_"
Carry = tuple[Parts, Any, tuple[Batch, ...]]  # meta-model, optimiser state, batches that wait for others
BATCHES = {"fo": 2, "hf": 3}  # independent batches of one meta-step; those without partners are left out


@dataclass(frozen=True)
class PerFedAvg(Method):
    """Shared meta-model w; `optimiser` makes the meta-step (β), plain descent the inner one (α)."""

    alpha: float = hyper(0.005, "α, learning rate of the inner step", low=0, source="PFLlib [C]")
    variant: str = hyper(
        "fo", "first order, or `hf` with the Hessian term", choices=("fo", "hf"), source="[P]"
    )
    delta: float = hyper(1e-3, "δ of the finite difference (`hf`)", low=1e-6, source="[D]")
    adapt_steps: int = hyper(1, "closing steps of size α, on one batch", low=0, source="[P]")

    title: ClassVar = "Per-FedAvg"
    citation: ClassVar = "Fallah et al., NeurIPS 2020"
    family: ClassVar = "global model, then tuned"
    has_global: ClassVar = True
    parts: ClassVar = {"extractor": shared(), "head": shared()}
    head_tier: ClassVar = HeadTier("adapted", "head, `adapt_steps` of size α", extras=("head",))

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        def step(carry: Carry, batch: Batch) -> Carry:
            w, state, waiting = carry
            waiting = (*waiting, batch)
            if len(waiting) < BATCHES[self.variant]:
                return w, state, waiting
            stepped, state = self.optimiser.step(tree.parameters(w), self._meta_gradient(w, *waiting), state)
            return tree.replaced(w, stepped), state, ()

        carry: Carry = (down, self.optimiser.init(tree.parameters(down)), ())
        norm = tree.has_buffers(down)
        return scan(step, carry, data, stage="train", epochs=self.epochs, norm=norm)[0], own

    def _meta_gradient(self, w: Parts, first: Batch, second: Batch, *third: Batch) -> Leaves:
        ahead, _ = descend(self.loss, w, {}, first, Sgd(self.alpha))
        g = gradient(self.loss, ahead, second)
        if not third:
            return g  # the Hessian taken as 0
        up, down = (gradient(self.loss, _moved(w, g, sign * self.delta), *third) for sign in (1, -1))
        return {p: g[p] - self.alpha * (up[p] - down[p]) / (2 * self.delta) for p in g}  # (I - αH) g

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        def step(w: Parts, batch: Batch) -> Parts:
            for _ in range(self.adapt_steps):
                w, _ = descend(self.loss, w, {}, batch, Sgd(self.alpha))
            return w

        w = scan(step, down, data, stage="adapt", epochs=1, norm=tree.has_buffers(down), limit=1)
        return {}, {**own, **tree.prefixed(ADAPTED, w)}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        return self.classify({**parts, **tree.unprefixed(ADAPTED, parts)}, x)


def _moved(w: Parts, direction: Leaves, by: float) -> Parts:
    return tree.replaced(w, {p: t + by * direction[p] for p, t in tree.parameters(w).items()})
