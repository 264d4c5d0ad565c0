"""FedAS: FedPer whose clients align the received extractor with their own head, and whose server gives under-trained ones less weight.

Before training, a client pulls the features of the received extractor to the class means of its own previous one, so that they fit its head
(parameter alignment). The server weighs clients by how much information on its data a trained model holds, so that under-trained models
count less (client synchronisation).

    align   π_c = mean of f_i(x) over class c;  f̂ ← argmin_f Σ_{c in batch} mean_{x of c} ||f(x) - π_c||²/d, from f^t
    train   (f_i, h_i) ← argmin ℓ(h(f(x)), y), from f̂ and the client's last h_i
    server  f^{t+1} = Σ_i F_i f_i / Σ_i F_i,  F_i = Σ_batches ||∇ℓ(f_i, h_i)||², the trace of the empirical Fisher information

Source: X. Yang, W. Huang, M. Ye, "FedAS: Bridging Inconsistency in Personalized Federated Learning", CVPR 2024.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Mean, Update, prototypes
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import fit, gradient, scan
from edge_fl.learn.losses import cross_entropy, one_hot
from edge_fl.learn.network.part import history, personal, shared
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract.method import HeadTier, Method, hyper


@dataclass(frozen=True)
class FedAS(Method):
    """Shared extractor, `fisher` (sent up: the trace F_i); personal head, and the extractor after the last participation."""

    align_epochs: int = hyper(1, "epochs of the alignment; 0: none", low=0, source="[C]")
    align_lr: float = hyper(0.01, "learning rate of the alignment", low=0, source="[C]")

    title = "FedAS"
    citation = "Yang et al., CVPR 2024"
    family = "shared extractor"
    stated_weight = ("fisher", "trace")
    grid = {"align_lr": (0.001, 0.01, 0.1), "align_epochs": (1, 5)}
    own = {"head": personal(), "personal_extractor": personal(like="extractor")}
    parts = {"extractor": shared(), "fisher": shared(), **own, "history": history(trained=0.0)}
    head_tier = HeadTier("adapted", "head")
    deviations = (
        "no alignment at the first participation, when the own extractor is untrained; the recipe's batch size, not 16; BatchNorm's running"
        " statistics are averaged with the extractor, by the traces (code: each client keeps its own, batch_norm = local_stats)"
    )

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        aligned = self._aligned(down["extractor"], own["personal_extractor"], data)
        start = tree.where(own["history"]["trained"], aligned, down["extractor"])
        w = {"extractor": start, "head": own["head"]}
        w = self.train(self.loss, w, data)
        history = {"trained": torch.ones_like(own["history"]["trained"])}
        up = {"extractor": w["extractor"], "fisher": {"trace": self._fisher(w, data)}}
        return up, {"head": w["head"], "personal_extractor": w["extractor"], "history": history}

    def _aligned(self, extractor: Params, previous: Params, data: Batches) -> Params:
        """The received extractor after the alignment with the client's previous one."""
        target = prototypes(data.features(self.net.extractor, previous))["mean"]

        def loss(f: Params, batch: Batch) -> Tensor:
            error = ((self.net.extractor(f, batch.x) - target[batch.y]) ** 2).mean(1)
            samples = (one_hot(batch.y, data.classes) * batch.real[:, None]).sum(0)  # of each class
            return torch.where(batch.real > 0, error / samples[batch.y].clamp(min=1), 0.0).sum()

        rate = Sgd(self.align_lr)
        return fit(loss, extractor, data, stage="s1", epochs=self.align_epochs, optimiser=rate)

    def _fisher(self, w: Parts, data: Batches) -> Tensor:
        """F_i: squared norms of the gradients of all batches, in inference behaviour."""

        def loss(w: Parts, batch: Batch) -> Tensor:
            z = self.net.extractor.frozen(w["extractor"], batch.x)
            return cross_entropy(self.net.head.frozen(w["head"], z), batch.y, batch.mask)

        def step(total: Tensor, batch: Batch) -> Tensor:
            squared = [(g**2).sum() for _, g in sorted(gradient(loss, w, batch).items())]
            return total + torch.stack(squared).sum()

        return scan(step, torch.zeros((), device=data.x.device), data, stage="s2", epochs=1)

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        mean = Mean()
        for update in updates:
            if "fisher" in update.parts:
                mean.add(update.parts["extractor"], max(float(update.parts["fisher"]["trace"]), 0.0))
        return {**shared, "extractor": mean.value() or shared["extractor"]}
