"""FedKD: C. Wu, F. Wu, L. Lyu, Y. Huang, X. Xie, "Communication-efficient federated learning via knowledge distillation", Nature
Communications 2022. A teacher that stays and a student that travels, in thin matrices, teach each other, the less the worse they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from edge_fl.learn import lowrank, tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.losses import cross_entropy, kl, squared_error
from edge_fl.learn.network.part import alignment, personal, shared
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.hyper import hyper
from edge_fl.methods.contract.method import PERSONAL, PERSONAL_MODEL, HeadTier, Method


@dataclass(frozen=True)
class FedKD(Method):
    """Shared student, sent as its `change`; personal teacher, and W_h from the student's features to the teacher's."""

    energy: float = hyper(0.95, "T_0, energy that is kept at first; 1: all", low=0, high=1, source="[P]")
    last_energy: float = hyper(0.98, "T_1, energy that is kept at last", low=0, high=1, source="[P]")
    rounds: int = hyper(100, "rounds from T_0 to T_1", low=1, source="[D]")
    compress: str = hyper("update", "what is made thin", choices=("update", "parameters"), source="[C]")
    detach_weight: bool = hyper(False, "no gradient through 1/(CE_t + CE_s)", source="[D]")
    max_norm: float = hyper(10.0, "gradients are clipped to; 0: not", low=0, source="PFLlib [C]")

    title: ClassVar = "FedKD"
    citation: ClassVar = "Wu et al., Nature Communications 2022"
    family: ClassVar = "personal model, shared student"
    has_global: ClassVar = True
    uniform: ClassVar = True
    sends: ClassVar = ("change",)
    receives: ClassVar = ("extractor", "head")
    student: ClassVar = dict.fromkeys((*receives, *sends), shared())
    parts: ClassVar = {**student, **PERSONAL_MODEL, "alignment": personal(alignment, salted=True)}
    head_tier: ClassVar = HeadTier("adapted", "head", extras=("head",))
    deviations: ClassVar = "the student goes down whole: who missed a round could not add a change to it"

    def at(self, round: int) -> Self:
        past = min(round / self.rounds, 1.0)
        return replace(super().at(round), energy=self.energy + past * (self.last_energy - self.energy))

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net = self.net

        def loss(w: Parts, batch: Batch) -> Tensor:
            z_s = net.extractor(w["extractor"], batch.x)
            z_t = net.personal_extractor(w["personal_extractor"], batch.x)
            s, t = net.head(w["head"], z_s), net.personal_head(w["personal_head"], z_t)
            run_id = cross_entropy(t, batch.y, batch.mask) + cross_entropy(s, batch.y, batch.mask)
            hidden = squared_error(z_t, net.alignment(w["alignment"], z_s), batch.mask)
            weight = (run_id.detach() if self.detach_weight else run_id).clamp(min=1e-6)
            return run_id + (kl(s, t, batch.mask) + kl(t, s, batch.mask) + 2 * hidden) / weight  # Eqs. 1 to 4

        clipped = replace(self.optimiser, max_norm=self.max_norm)
        w = fit(loss, {**down, **own}, data, stage="train", epochs=self.epochs, optimiser=clipped)
        base = lowrank.base(down, self.compress)
        change = {name: tree.map(torch.sub, w[name], base[name]) for name in down}
        return {"change": tree.flat(change)}, {name: w[name] for name in own}

    def pack(self, up: Parts) -> Parts:
        return {name: lowrank.factorised(change, self.energy) for name, change in up.items()}

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        student = self.broadcast(shared, "")
        base = lowrank.base(student, self.compress)
        change = lowrank.mean(updates, "change", tree.flat(tree.map(torch.sub, student, base)), self.energy)
        return {**shared, **tree.map(torch.add, base, tree.shaped(change, student))}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        return self.classify(tree.unprefixed(PERSONAL, parts), x)
