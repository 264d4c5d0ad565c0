"""Class statistics: a prior for personal heads on a fixed extractor, as head-only devices make and use it (docs/class-statistics.md).

Clients send the class statistics of their labelled pictures once. The server adds them up; each client then adapts the fleet's head of the
others' sum to its labels. Without the prior it is the cosine head of the own labels.

    client  n_c, s_c = Σ_{y_i = c} u_i, M = Σ_i q_i q_iᵀ       u: centred directions of features, q: their projection
    server  sums of all three
    client  subtracts its own
    final   the served head (`edge_fl.heads.served`) around the linear discriminant of the sums (`class_statistics.prior`)
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from edge_fl import heads
from edge_fl.heads.class_statistics import sums
from edge_fl.heads.class_statistics.prior import PRIOR
from edge_fl.heads.plan import HeadPlan
from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.batches import Batches
from edge_fl.learn.network.part import history, shared
from edge_fl.learn.tree import Parts, from_arrays, to_arrays
from edge_fl.methods.contract.method import HeadTier, Method, hyper


@dataclass(frozen=True)
class ClassStatistics(Method):
    """Shared extractor that is never updated, and the prior; the server's memory `counted` names the clients in it."""

    prior: bool = hyper(True, "whether heads use the prior", source="[D]")

    title = "Class-Statistics"
    citation = "edge-fl; statistics as in Guan et al., AAAI 2025"
    family = "fixed extractor, statistics"
    receives = ("extractor", PRIOR)
    sends = (PRIOR,)
    parts = {**dict.fromkeys((*receives, "counted"), shared()), "history": history(sent=0.0)}
    predicts_early = False
    vectorises = False
    head_tier = HeadTier("native", "the prior's head, adapted", extras=(PRIOR,), start="", way="cosine")
    deviations = "a method of edge-fl, not of a paper; clients may come in any round, and count once"

    def init_shared(self) -> Parts:
        shape = sums.shape_of(self.net.classes, self.net.feature_dim)
        nothing = sums.from_flat(np.zeros(shape.length), shape)
        return {**super().init_shared(), **from_arrays({PRIOR: nothing.addends()}), "counted": {}}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        z, y = self._features(down, data)
        if not self.prior or len(np.unique(y)) < 2:
            return {}, own
        sent = {"history": tree.map(torch.ones_like, own["history"])}
        statistics = from_arrays({PRIOR: self._statistics(z, y).addends()})
        return tree.to_device(statistics, down[PRIOR]["count"].device), {**own, **sent}

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        counted, total = dict(shared["counted"]), tree.map(Tensor.double, shared[PRIOR])
        for update in updates:
            if update.client not in counted and PRIOR in update.parts:
                counted[update.client] = torch.ones((), device=total["count"].device)
                total = tree.map(torch.add, total, update.parts[PRIOR])
        return {**shared, PRIOR: tree.map(Tensor.float, total), "counted": counted}

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        """Fit the personal head on features, outside torch, as a head-only device does."""
        z, y = self._features(down, data)
        extras = to_arrays({PRIOR: down[PRIOR]}) if self.prior and down[PRIOR]["count"].any() else {}
        if extras and own["history"]["sent"]:
            others = sums.from_arrays(extras[PRIOR]).without(self._statistics(z, y))
            extras = {PRIOR: others.addends()}
        plan = HeadPlan("cosine", fleet=PRIOR if extras else "")
        fitted = heads.fit("logistic", z, y, self.net.classes, unit_norm=False, plan=plan, extras=extras)
        return {}, {**own, **from_arrays({"head": fitted.to_arrays()})}

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        arrays = to_arrays({"head": parts["head"]})["head"]
        kind = "cosine" if "weights" in arrays else "constant"  # an adapted head is as linear in directions
        head = heads.from_arrays(arrays, {"kind": kind, "classes": str(self.net.classes)})
        return torch.from_numpy(head.logits(self.features(parts, x).cpu().numpy())).to(x.device)

    def _statistics(self, z: heads.head.Features, y: sums.Labels) -> sums.Statistics:
        rows = sums.uncounted(sums.keys_of(z), y, {})
        return sums.of(z, y, self.net.classes, rows)

    def _features(self, down: Parts, data: Batches) -> tuple[heads.head.Features, sums.Labels]:
        z = data.features(self.net.extractor, down["extractor"])
        x, y = z.x.cpu().numpy(), z.y.cpu().numpy()
        return x[y >= 0], y[y >= 0]
