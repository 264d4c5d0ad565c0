"""SphereFed: clients train the extractor so that features of length 1 match the row of their class in a fixed orthonormal head.

After the last round the head W is calibrated in closed form (least squares) from sums over all clients' features.

    z = f(x)/||f(x)||,  min mean (W z - onehot(y))²
    A_i = Σ z zᵀ,  B_i = Σ z onehot(y)ᵀ,  W* = ((Σ_i A_i + λ I)⁻¹ Σ_i B_i)ᵀ

Source: X. Dong, S. Q. Zhang, A. Li, H. T. Kung, "SphereFed: Hyperspherical Federated Learning", ECCV 2022.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edge_fl.config import OptimiserConfig
from edge_fl.errors import MethodError
from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.losses import one_hot, squared_error, unit
from edge_fl.learn.network.part import Net, shared
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract.method import HeadTier, Method, hyper


def _orthonormal_head(net: Net, method: "SphereFed") -> nn.Module:
    if net.feature_dim < net.classes:
        raise MethodError(
            f"SphereFed: {net.feature_dim} features for {net.classes} classes, expected at least as many features"
        )
    head = nn.Linear(net.feature_dim, net.classes, bias=False)
    nn.init.orthogonal_(head.weight)
    return head


@dataclass(frozen=True)
class SphereFed(Method):
    """Shared extractor; the head is drawn from the seed and sent only after calibration."""

    ridge: float = hyper(1e-3, "λ of the calibration", low=1e-12, source="[D]")

    title = "SphereFed"
    citation = "Dong et al., ECCV 2022"
    family = "global model, fixed head"
    has_global = True
    unit_norm = True
    fixed_head = True
    parts = {"extractor": shared(), "head": shared(_orthonormal_head), "sums": shared()}
    sends = ("extractor", "sums")
    head_tier = HeadTier(
        "native",
        "nothing, or a personal ridge head",
        extras=("head",),
        updates={"sums": "ridge_sums"},
        way="ridge",
        numbers={"ridge": "ridge"},
        final=True,
    )
    usual_optimiser = OptimiserConfig("sgd", 0.1, momentum=0.5)
    deviations = "the loss is the mean over samples and classes"

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, head = self.net, self.net.head.init()

        def loss(f: Params, batch: Batch) -> Tensor:
            logits = net.head.frozen(head, unit(net.extractor(f, batch.x)))
            return squared_error(logits, one_hot(batch.y, net.classes), batch.mask)

        f = self.train(loss, down["extractor"], data)
        return {"extractor": f}, own

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        z = data.mapped(lambda x: self.features(down, x)).x.to(torch.float64)
        labels = one_hot(data.y, self.net.classes).to(torch.float64)
        sums = {"gram": z.T @ z, "moment": z.T @ labels}  # A_i and B_i
        return {"sums": tree.map(Tensor.float, sums)}, own

    def finalise(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        sums = [update.parts["sums"] for update in updates if "sums" in update.parts]
        if not sums:
            return shared
        gram, moment = (torch.stack([one[key] for one in sums]).double().sum(0) for key in ("gram", "moment"))
        regularised = gram + self.ridge * torch.eye(len(gram), dtype=torch.float64, device=gram.device)
        head = torch.linalg.solve(regularised, moment).T.float().contiguous()
        return {**shared, "head": {"weight": head}}

    def features(self, parts: Parts, x: Tensor) -> Tensor:
        return unit(super().features(parts, x))
