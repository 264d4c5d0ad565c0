"""Per-FedAvg: clients train a meta-model for good accuracy after one further gradient step, which every client takes at the end.

Each outer step uses independent batches b, b' (and b'' for the Hessian); the server averages the meta-model w by samples.

    w ← w - β (I - α H(w; b'')) ∇ℓ(w - α ∇ℓ(w; b); b')    `fo` leaves out H, `hf` takes H by finite difference

Source: A. Fallah, A. Mokhtari, A. Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach", NeurIPS 2020.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import descend, gradient, scan
from edge_fl.learn.optimiser import Leaves, Sgd
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import SHARED_MODEL, HeadTier, Method, Numbers, hyper

ADAPTED = "adapted_"
TIER: Numbers = {"epochs": "adapt_steps", "lr": "alpha", "momentum": 0.0, "weight_decay": 0.0, "batches": 1}
# w, model after the inner step, its gradient, optimiser state, position
Carry = tuple[Leaves, Parts, Leaves, Any, int]


@dataclass(frozen=True)
class PerFedAvg(Method):
    """Shared meta-model w; `optimiser` makes the outer step (β), plain SGD the inner one (α)."""

    alpha: float = hyper(0.005, "α, learning rate of the inner step", low=0, source="PFLlib [C]")
    variant: str = hyper("fo", "first order, or with the Hessian", choices=("fo", "hf"), source="[P]")
    delta: float = hyper(1e-3, "δ of the finite difference (`hf`)", low=1e-6, source="[D]")
    adapt_steps: int = hyper(1, "final steps of size α, on one batch", low=0, source="[P]")

    title = "Per-FedAvg"
    citation = "Fallah et al., NeurIPS 2020"
    family = "global model, then fine-tuned"
    grid = {"alpha": (0.001, 0.005, 0.01, 0.05)}
    has_global = True
    parts = SHARED_MODEL
    deviations = "first order by default, as in PFLlib; β is the recipe's rate; a client with too few batches divides them"
    head_tier = HeadTier("adapted", "`adapt_steps` of size α", ("head",), way="tuned", numbers=TIER)

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        inner = Sgd(self.alpha)

        def step(carry: Carry, batch: Batch) -> Carry:
            w, model, grad, state, position = carry
            if position == 0:  # first batch: inner step
                model, _ = descend(self.loss, tree.replaced(model, w), {}, batch, inner)
                return w, model, grad, state, 1
            if position == 1:  # second batch: gradient after the inner step
                grad = gradient(self.loss, model, batch)
                if self.variant == "hf":
                    return w, model, grad, state, 2
            else:  # third batch: multiply by (I - α H)
                grad = self._corrected(w, model, grad, batch)
            w, state = self.optimiser.step(w, grad, state)
            return w, model, grad, state, 0

        w = tree.parameters(down)
        carry, norm = (w, down, w, self.optimiser.init(w), 0), tree.has_buffers(down)
        data = data.in_at_least(3 if self.variant == "hf" else 2, self.epochs, norm=norm)
        w, model, *_ = scan(step, carry, data, stage="train", epochs=self.epochs, norm=norm)
        return tree.replaced(model, w), own

    def _corrected(self, w: Leaves, model: Parts, grad: Leaves, batch: Batch) -> Leaves:
        """(I - α H) g, with H g = (∇ℓ(w + δ g) - ∇ℓ(w - δ g)) / 2δ."""
        ends = [{p: t + sign * self.delta * grad[p] for p, t in w.items()} for sign in (1, -1)]
        up, down = (gradient(self.loss, tree.replaced(model, end), batch) for end in ends)
        return {p: g - self.alpha * (up[p] - down[p]) / (2 * self.delta) for p, g in grad.items()}

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        def step(w: Parts, batch: Batch) -> Parts:
            for _ in range(self.adapt_steps):
                w, _ = descend(self.loss, w, {}, batch, Sgd(self.alpha))
            return w

        w = scan(step, down, data, stage="adapt", epochs=1, norm=tree.has_buffers(down), limit=1)
        return {}, {**own, **tree.prefixed(ADAPTED, w)}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        return self.classify({**parts, **tree.unprefixed(ADAPTED, parts)}, x)
