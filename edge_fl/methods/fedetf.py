"""FedETF: all clients train towards one fixed head whose class directions are equally far apart, a simplex equiangular tight frame.

The frame M is not trained. Clients train extractor f, projection q and scale s towards it with the balanced softmax loss. In final
personalisation every client trains its own copies of frame and projection, alternately.

    μ = q(f(x)) / ||q(f(x))||,  min CE(s Mᵀμ + log n_{i,c})                   docs/methods-formulas.md F7
    M = sqrt(C/(C-1)) P (I - 11ᵀ/C),  PᵀP = I                                 docs/methods-formulas.md F9

Source: Z. Li, X. Shang, R. He, T. Lin, C. Wu, "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and
Fixed Classifier", ICCV 2023.
"""

import math
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from edge_fl.config import OptimiserConfig
from edge_fl.learn import tree
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.losses import balanced_cross_entropy, cross_entropy, unit
from edge_fl.learn.network.part import Net, shared
from edge_fl.learn.optimiser import Sgd
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import PERSONAL, HeadTier, Method, hyper


def _frame_head(net: Net, method: "FedETF") -> nn.Module:
    """Projected features [N, e] -> logits [N, C]: inner products with the columns of the frame."""
    width = max(net.feature_dim, net.classes)
    head = nn.Linear(width, net.classes, bias=False)
    head.weight = nn.Parameter(simplex_etf(torch.randn(width, net.classes)).T.contiguous())
    return head


def simplex_etf(rotation: Tensor) -> Tensor:
    """Simplex equiangular tight frame [e, C] from any full-rank `rotation` [e, C]: unit columns, inner products -1/(C-1)."""
    classes = rotation.shape[1]
    basis, _ = torch.linalg.qr(rotation.to(torch.float64))
    centred = torch.eye(classes, dtype=torch.float64) - 1.0 / classes
    frame: Tensor = math.sqrt(classes / (classes - 1)) * basis @ centred
    return frame.to(torch.float32)


@dataclass(frozen=True)
class FedETF(Method):
    """Shared extractor, projection and scale s; the head is the frame, drawn from the seed by server and clients."""

    scale: float = hyper(10.0, "initial value of the trained scale s; 1 for ResNets", low=1e-3, source="[C]")
    alternations: int = hyper(20, "final repetitions of frame, then projection; 0: none", low=0, source="[C]")
    ft_epochs: int = hyper(3, "epochs of each of the two per repetition", low=0, source="[C]")
    frame_lr: float = hyper(0.1, "learning rate of the personal frame", low=0, source="[C]")
    projection_lr: float = hyper(
        0.05, "learning rate of the personal projection, momentum 0.9", low=0, source="[C]"
    )

    title = "FedETF"
    citation = "Li et al., ICCV 2023"
    family = "global model, fixed head"
    grid = {"scale": (1.0, 5.0, 10.0)}
    has_global = True
    unit_norm = True
    parts = {
        "extractor": shared(),
        # features [N, d] -> [N, e], e = max(d, C): a frame needs at least one dimension per class
        "projection": shared(lambda net, _: nn.Linear(net.feature_dim, max(net.feature_dim, net.classes))),
        "head": shared(_frame_head),
        "scale": shared(),
    }
    exports = ("extractor", "projection")
    sends = (*exports, "scale")
    fixed_head = True
    head_tier = HeadTier(
        "native",
        "a personal copy of the frame",
        extras=("head", "scale"),
        way="tuned",
        numbers={
            "epochs": "frame_epochs",
            "lr": "frame_lr",
            "momentum": 0.0,
            "weight_decay": 0.0,
            "min_steps": 0,
        },
    )
    deviations = (
        "official runs use 3 epochs and batches of 128, here the recipe's; BatchNorm as in any method"
    )
    usual_optimiser = OptimiserConfig("sgd", 0.04, momentum=0.9, weight_decay=5e-4)

    @property
    def frame_epochs(self) -> int:
        """Epochs on the personal frame in final personalisation; the head tier names it."""
        return self.alternations * self.ft_epochs

    def init_shared(self) -> Parts:
        return {**super().init_shared(), "scale": {"s": torch.tensor(self.scale)}}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, frame, counts = self.net, self.net.head.init(), data.counts

        def loss(w: Parts, batch: Batch) -> Tensor:
            mu = unit(net.projection(w["projection"], net.extractor(w["extractor"], batch.x)))
            return balanced_cross_entropy(w["scale"]["s"] * net.head(frame, mu), batch.y, counts, batch.mask)

        return self.train(loss, down, data), own

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        """Another local update, then frame and projection alternately on features of the resulting extractor."""
        net, w = self.net, {**self.local_update(down, own, data)[0], "head": self.net.head.init()}

        def loss(tuned: Parts, batch: Batch) -> Tensor:
            mu = unit(net.projection({**w, **tuned}["projection"], batch.x))
            logits = w["scale"]["s"] * net.head({**w, **tuned}["head"], mu)
            return cross_entropy(logits, batch.y, batch.mask)

        z = data.features(net.extractor, w["extractor"])
        optimisers = {"head": Sgd(self.frame_lr), "projection": Sgd(self.projection_lr, 5e-4, momentum=0.9)}
        for turn, (name, opt) in product(range(self.alternations), optimisers.items()):
            w |= fit(loss, {name: w[name]}, z, stage=f"{name}.{turn}", epochs=self.ft_epochs, optimiser=opt)
        return {}, {**own, **tree.prefixed(PERSONAL, w)}

    def features(self, parts: Parts, x: Tensor) -> Tensor:
        return unit(self.net.projection.frozen(parts["projection"], super().features(parts, x)))
