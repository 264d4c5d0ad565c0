"""RepPer: clients train a shared extractor with a contrastive loss; after the last round each fits a personal head on its features.

Stage 1, every round: the supervised contrastive loss on two augmented views of each image; the server averages the extractors by samples
(the contract's default `aggregate`). Stage 2, after the last round: each client fits a personal head (SVM, logistic regression or MLP) on
the frozen features of its original images.

    z = f(x)/||f(x)|| (through a projection, if any),  s_ia = z_i·z_a/τ,  P(i): other views with the label of view i
    L_in  = mean_i -log[ 1/|P(i)| Σ_{p∈P(i)} exp(s_ip) / Σ_{a≠i} exp(s_ia) ]    Eq. 5, the default
    L_out = mean_i 1/|P(i)| Σ_{p∈P(i)} -log[ exp(s_ip) / Σ_{a≠i} exp(s_ia) ]    Khosla et al., NeurIPS 2020

Source: C. Jing, Y. Huang, Y. Zhuang, L. Sun, Y. Huang, Z. Xiao, X. Ding, "A Closer Look at Personalization in Federated Image
Classification", arXiv:2204.11841 (2022).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from edge_fl import heads
from edge_fl.config import OptimiserConfig
from edge_fl.learn.augment import AUGMENTATIONS, augmented
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.losses import supcon, supcon_in, unit
from edge_fl.learn.network.part import projection, shared
from edge_fl.learn.random import fold
from edge_fl.learn.tree import Parts, from_arrays, to_arrays
from edge_fl.methods.contract.method import HeadTier, Method, hyper


@dataclass(frozen=True)
class RepPer(Method):
    """Shared extractor (and projection for stage 1); personal heads are fitted in final personalisation."""

    temperature: float = hyper(0.1, "temperature of the contrastive loss", low=1e-3, source="[P]")
    supcon: str = hyper("in", "L_in of Eq. 5, or L_out", choices=("in", "out"), source="Eq. 5 [P]")
    proj_dim: int = hyper(0, "width of the projection in stage 1; 0: none", low=0, source="128 in Khosla")
    augment: str = hyper(
        "auto",
        "augmentation that makes a view; auto: gentle for grey images, supcon for colour, jitter for others",
        choices=("auto", *AUGMENTATIONS),
        source="[D]",
    )
    head: str = hyper(
        "mlp", "kind of the personal head", choices=tuple(heads.HEADS), source="MLP, SVM or LR [P]"
    )

    title = "RepPer"
    citation = "Jing et al., arXiv:2204.11841 (2022)"
    family = "shared extractor, contrastive"
    grid = {"temperature": (0.05, 0.1, 0.5), "head": ("mlp", "svm", "logistic")}
    parts = {
        "extractor": shared(),
        "projection": shared(lambda net, method: projection(net, method.proj_dim)),
    }
    unit_norm = True
    predicts_early = False
    head_tier = HeadTier("native", "SVM, logistic regression or MLP on unit-length features")
    usual_optimiser = OptimiserConfig("adam", 0.001, weight_decay=1e-4)
    deviations = (
        "mean over anchors (Eq. 4 sums); the paper names no augmentation; the rate decays only where the recipe says so;"
        " the MLP head trains for at least 300 steps (paper: 10 epochs)"
    )

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, suitable = self.net, "supcon" if self.net.input.channels == 3 else "gentle"
        suitable = suitable if net.input.kind == "picture" else "jitter"
        name = suitable if self.augment == "auto" else self.augment
        contrast = supcon_in if self.supcon == "in" else supcon

        def loss(w: Parts, batch: Batch) -> Tensor:  # Eq. 5
            views = torch.cat([augmented(name, batch.x, fold(batch.key, view)) for view in (1, 2)])
            z = unit(net.projection(w.get("projection", {}), net.extractor(w["extractor"], views)))
            mask = None if batch.mask is None else batch.mask.repeat(2)
            return contrast(z, batch.y.repeat(2), self.temperature, mask)

        return self.train(loss, down, data), own

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        """Stage 2: fit the personal head on features of the final extractor, outside torch (`edge_fl.heads`)."""
        z = data.mapped(lambda x: self.features(down, x))
        x, y = z.x.cpu().numpy(), z.y.cpu().numpy()
        fitted = heads.fit(self.head, x, y, self.net.classes, unit_norm=True, seed=data.run)
        return {}, from_arrays({"head": fitted.to_arrays()})

    def features(self, parts: Parts, x: Tensor) -> Tensor:
        return unit(self.net.extractor.frozen(parts["extractor"], x))

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        arrays = to_arrays({"head": parts["head"]})["head"]
        one_class = arrays.keys() != heads.HEADS[self.head].shapes.keys()
        kind = "constant" if one_class else self.head
        head = heads.from_arrays(arrays, {"kind": kind, "classes": str(self.net.classes)})
        return torch.from_numpy(head.logits(self.features(parts, x).cpu().numpy())).to(x.device)
