"""SCAFFOLD: FedAvg whose clients correct every step by the difference between the mean gradient of all clients and their own.

c_i is the control variate of client i, its mean gradient in its last participation; c is the mean of c_i over clients.

    y ← y - η (∇ℓ(y) + c - c_i), K times from w^t                       Eq. 3
    c_i⁺ = c_i - c + (w^t - y)/(K η), the mean of the K gradients ∇ℓ(y)  Eq. 4, option II
    server: w ← w + η_g mean (y_i - w),  c ← c + |S|/N mean (c_i⁺ - c_i)  Eq. 5

Source: S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update, noted, remembered, stepped, weighted_mean
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import gradient, scan
from edge_fl.learn.network.part import history, personal, shared
from edge_fl.learn.optimiser import Leaves
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import SHARED_MODEL, HeadTier, Method, hyper

CONTROL, OWN = "control_", "own_control_"
Carry = tuple[Parts, Any, Leaves, Tensor]  # w, optimiser state, sum of gradients, steps


@dataclass(frozen=True)
class SCAFFOLD(Method):
    """Shared model and c (`control_`), which clients send as c + c_i⁺ - c_i; personal is c_i (`own_control_`).

    The server's memory `counted` names the clients that took part.
    """

    server_lr: float = hyper(1.0, "η_g, server's step to the mean", low=0, high=2, source="1 [P]")

    title = "SCAFFOLD"
    citation = "Karimireddy et al., ICML 2020"
    family = "global model"
    grid = {"server_lr": (0.5, 1.0)}
    has_global = True
    uniform = True
    controls = {f"{CONTROL}{name}": shared(like=name) for name in SHARED_MODEL}
    sends = receives = (*SHARED_MODEL, *controls)
    own = {f"{OWN}{name}": personal() for name in SHARED_MODEL}
    parts = {**SHARED_MODEL, **controls, "counted": shared(), **own, "history": history(trained=0.0)}
    head_tier = HeadTier("adapted", "head", extras=("head",))
    deviations = (
        "a client's first c_i is the c that it receives, and N are the clients that took part so far (published: 0, and all);"
        " what an update that is lost or left out would add to c stays missing"
    )

    def init_shared(self) -> Parts:
        return {**super().init_shared(), **tree.prefixed(CONTROL, self.net.zeros()), "counted": {}}

    def init_own(self, client: str) -> Parts:
        return {**super().init_own(client), **tree.prefixed(OWN, self.net.zeros())}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        common, mine = tree.unprefixed(CONTROL, down), tree.unprefixed(OWN, own)
        mine = tree.where(own["history"]["trained"], mine, common)
        c, c_i = tree.parameters(common), tree.parameters(mine)
        correction = {path: data.copy(c[path] - t) for path, t in c_i.items()}

        def step(carry: Carry, batch: Batch) -> Carry:
            w, state, total, steps = carry
            grads = gradient(self.loss, w, batch)
            total = {path: total[path] + g for path, g in grads.items()}
            corrected = {path: g + correction[path] for path, g in grads.items()}  # Eq. 3
            self.optimiser.advance(tree.parameters(w), corrected, state)
            return w, state, total, steps + 1

        w = {name: down[name] for name in SHARED_MODEL}
        held, norm = tree.parameters(w), tree.has_buffers(w)
        zeros = tree.map(torch.zeros_like, held)
        start = (w, self.optimiser.init(held), zeros, torch.zeros((), device=data.x.device))
        w, _, total, steps = scan(step, start, data, stage="train", epochs=self.epochs, norm=norm)
        means = {path: t / steps.clamp(min=1) for path, t in total.items()}
        new = tree.where(steps, means, c_i)  # Eq. 4; without a batch as before
        sent = tree.replaced(mine, {path: c[path] + (t - c_i[path]) for path, t in new.items()})
        kept = {
            **tree.prefixed(OWN, tree.replaced(mine, new)),
            "history": {"trained": torch.ones_like(steps)},
        }
        return {**w, **tree.prefixed(CONTROL, sent)}, kept

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        clients: list[str] = []
        mean = weighted_mean(shared, noted(updates, clients), uniform=True)
        counted = remembered(shared["counted"], clients, like=mean)
        share = len(clients) / max(len(counted), 1)
        sizes = {name: share if name in self.controls else self.server_lr for name in self.sends}
        moved = {name: stepped(shared[name], mean[name], size) for name, size in sizes.items()}  # Eq. 5
        return {**mean, **moved, "counted": counted}
