"""FedKD: a personal teacher and a shared student distil into each other; the student is sent as low-rank factors of its change.

Teacher t and student s are trained with cross-entropy too; the weight of distillation decreases with their error. The server averages the
changes with equal weights.

    D = CE_t + CE_s,  min D + [KL(s || t) + KL(t || s) + 2 MSE(z_t, W_h z_s)] / D                    Eqs. 1 to 4
    A = U Σ Vᵀ: keep the smallest K with Σ_{k≤K} σ_k² >= T Σ σ_k², T from T_0 to T_1 over the rounds   docs/methods-formulas.md F10

Source: C. Wu, F. Wu, L. Lyu, Y. Huang, X. Xie, "Communication-efficient federated learning via knowledge distillation", Nature
Communications 2022.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Mean, Update
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.losses import cross_entropy, kl, squared_error
from edge_fl.learn.network.part import Net, personal, shared
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract.method import PERSONAL, PERSONAL_MODEL, HeadTier, Method, hyper

LEFT, RIGHT = "~left", "~right"  # suffixes of a factorised tensor's name


def _alignment(net: Net, method: "FedKD") -> nn.Module:
    return nn.Linear(net.feature_dim, net.feature_dim, bias=False)


@dataclass(frozen=True)
class FedKD(Method):
    """Shared student, sent as its `change`; personal teacher and W_h."""

    energy: float = hyper(0.95, "T_0, energy kept in the first round; 1: all", low=0, high=1, source="[P]")
    last_energy: float = hyper(0.98, "T_1, energy kept in the last round", low=0, high=1, source="[P]")
    rounds: int = hyper(0, "rounds from T_0 to T_1; 0: those of the run", low=0, source="[D]")
    compress: str = hyper("update", "what is factorised", choices=("update", "parameters"), source="[C]")
    detach_weight: bool = hyper(True, "no gradient through 1/(CE_t + CE_s)", source="[D]; false [P, C]")
    max_norm: float = hyper(10.0, "limit of the gradient's norm; 0: none", low=0, source="PFLlib [C]")

    title = "FedKD"
    citation = "Wu et al., Nature Communications 2022"
    family = "personal model, shared student"
    grid = {"energy": (0.9, 0.95, 0.98)}
    has_global = True
    uniform = True
    sends = ("change",)
    receives = ("extractor", "head")
    student = dict.fromkeys((*receives, *sends), shared())
    parts = {**student, **PERSONAL_MODEL, "alignment": personal(_alignment, salted=True)}
    head_tier = HeadTier("adapted", "head", extras=("head",))
    deviations = (
        "clients receive the whole student, so that one that missed a round is up to date;"
        " no gradient through the weight 1/D, which grows as losses fall"
    )

    def at(self, round: int) -> Self:
        past = min(round / (self.rounds or self.total_rounds or round), 1.0)
        return replace(super().at(round), energy=self.energy + past * (self.last_energy - self.energy))

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net = self.net

        def loss(w: Parts, batch: Batch) -> Tensor:
            z_s = net.extractor(w["extractor"], batch.x)
            z_t = net.personal_extractor(w["personal_extractor"], batch.x)
            s, t = net.head(w["head"], z_s), net.personal_head(w["personal_head"], z_t)
            error = cross_entropy(t, batch.y, batch.mask) + cross_entropy(s, batch.y, batch.mask)
            hidden = squared_error(z_t, net.alignment(w["alignment"], z_s), batch.mask)
            divisor = (error.detach() if self.detach_weight else error).clamp(min=1e-6)
            return error + (kl(s, t, batch.mask) + kl(t, s, batch.mask) + 2 * hidden) / divisor  # Eqs. 1 to 4

        clipped = replace(self.optimiser, max_norm=self.max_norm)
        w = fit(loss, {**down, **own}, data, stage="train", epochs=self.epochs, optimiser=clipped)
        base = self._base(down)
        change = {name: tree.map(torch.sub, w[name], base[name]) for name in down}
        return {"change": tree.flat(change)}, {name: w[name] for name in own}

    def before_training(self, down: Parts, own: Parts) -> Parts:
        return {**own, **tree.prefixed(PERSONAL, {name: down[name] for name in self.receives})}

    def pack(self, up: Parts) -> Parts:
        return {name: factorised(change, self.energy) for name, change in up.items()}

    def unpack(self, down: Parts, sent: Parts) -> Parts:
        return {name: multiplied(change, tree.flat(down)) for name, change in sent.items()}

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        student = self.broadcast(shared, "")
        base, mean = self._base(student), Mean()
        old = tree.flat(tree.map(torch.sub, student, base))
        for update in updates:
            if "change" in update.parts:
                mean.add(multiplied(update.parts["change"], old), 1)
        # the mean is cut to `energy` too
        change = multiplied(factorised(mean.value() or old, self.energy), old)
        return {**shared, **tree.map(torch.add, base, tree.shaped(change, student))}

    def _base(self, student: Parts) -> Parts:
        """What `change` is added to: the received student for "update", zero for "parameters"."""
        return student if self.compress == "update" else tree.map(torch.zeros_like, student)


def rank(singular: Tensor, energy: float) -> int:
    """The smallest K >= 1 such that the first K singular values (descending) hold `energy` of the sum of their squares."""
    held = (singular.to(torch.float64) ** 2).cumsum(0)
    return 1 + int((held < energy * held[-1]).sum())


def factorised(params: Params, energy: float) -> Params:
    """Each matrix [o, r] as ``name~left`` [o, K] and ``name~right`` [K, r] where that is smaller; a convolution counts as [out, rest]."""
    thin: Params = {}
    for name, tensor in params.items():
        if tensor.ndim > 1:
            u, singular, v = torch.linalg.svd(tensor.flatten(1), full_matrices=False)
            k = rank(singular, energy)
            if k * sum(tensor.flatten(1).shape) < tensor.numel():
                thin |= {name + LEFT: u[:, :k] * singular[:k], name + RIGHT: v[:k]}
                continue
        thin[name] = tensor
    return thin


def multiplied(thin: Params, like: Params) -> Params:
    """The inverse of `factorised`, with the names and shapes of `like`."""
    return {
        name: thin[name] if name in thin else (thin[name + LEFT] @ thin[name + RIGHT]).reshape(tensor.shape)
        for name, tensor in like.items()
    }
