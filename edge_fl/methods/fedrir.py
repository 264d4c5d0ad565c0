"""FedRIR: besides the shared extractor each client has its own, which keeps what is specific to the client out of the shared one.

The specific extractor (feature f_cs) learns to reconstruct masked images. The shared extractor (feature f_g) then trains with a personal
head on both features, while an upper bound of their mutual information keeps client-specific information out of it. The server averages the
shared extractors by samples.

    s1   specific extractor, decoder:  min mean (decoder(z) - x)² + w KL(N(m, s²) || N(0, I)),  z ~ N(m, s²)   Eqs. 4 and 5
    s2a  estimator q:                  min -log q(f_g | f_cs)
    s2b  shared extractor, head:       min ℓ(head([f_g, f_cs])) + λ vCLUB,  alternating with s2a on every batch
         vCLUB = mean_i log q(f_g,i | f_cs,i) - mean_ij log q(f_g,j | f_cs,i)    Cheng et al., ICML 2020; docs/methods-formulas.md F5

The specific extractor outputs m and log s²: of the masked image in s1, of the whole image in s2, where f_cs = m. q(y|x) is a Gaussian.

Source: Y. Huang, Z. Shao, Z. Yang, Z. Lu, Y. Zhang, "FedRIR: Rethinking Information Representation in Federated Learning", WWW 2025.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from edge_fl.config import OptimiserConfig
from edge_fl.inputs import InputSpec
from edge_fl.learn import tree
from edge_fl.learn.augment import hide_patches
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.fit import apply_gradient, descend, fit_from, gradient, scan
from edge_fl.learn.losses import cross_entropy, gaussian_kl, gaussian_nll, masked_mean, vclub
from edge_fl.learn.network.part import Net, personal, shared
from edge_fl.learn.random import fold, normal
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract.method import BatchNorm, HeadTier, Method, hyper
from edge_fl.models.normalise import constant, normalised

HIDDEN = 128  # width inside the estimator
OBJECTIVES = {  # (loss of q in s2a, loss of the extractor in s2b); where they are equal, one joint step replaces s2a and s2b
    "vclub": (gaussian_nll, vclub),
    "nll_joint": (gaussian_nll, gaussian_nll),  # official code: -log q(f_cs | f_g)
    "joint_literal": (vclub, vclub),  # the paper's text, literally
    "none": (None, None),
}
STATES = {  # a personal part that keeps an optimiser's state -> the parts that it trains
    "s1_state": ("specific_extractor", "decoder"),
    "q_state": ("estimator",),
    "s2_state": ("extractor", "head"),
}


def specific_extractor(net: Net, method: object = None) -> nn.Module:
    """The shared extractor's architecture with 2d outputs: mean and log-variance of the client-specific feature."""
    module = net.parts["extractor"].build()
    leaves = [
        name
        for name, child in module.named_modules()
        if not [*child.children()] and not isinstance(child, nn.Identity)
    ]
    last = module.get_submodule(leaves[-1])
    if not isinstance(last, nn.Linear):
        return nn.Sequential(module, nn.Linear(net.feature_dim, 2 * net.feature_dim))
    module.set_submodule(leaves[-1], nn.Linear(last.in_features, 2 * net.feature_dim))
    return module


def specific_feature(net: Net, parts: Parts, x: Tensor) -> Tensor:
    """f_cs [N, d]: the mean that the specific extractor gives for whole images."""
    return halves(net.specific_extractor.frozen(parts["specific_extractor"], x))[0]


def halves(gaussian: Tensor) -> tuple[Tensor, Tensor]:
    """[N, 2d] -> mean and log-variance, [N, d] each."""
    mean, log_variance = gaussian.chunk(2, dim=1)
    return mean, log_variance


class Decoder(nn.Module):
    """Features [N, d] -> normalised images [N, C, H, W]: linear to 64 small planes, then two transposed convolutions 5x5 of stride 2.

    Sides that are not 4s + 12 are cropped. With the model `cnn2-bn` it has the size of the official code, as have the other networks.
    Other samples are taken as images of height 1, with kernels 1x5; a row of a table and a clip have one channel.
    """

    def __init__(self, dim: int, input: InputSpec) -> None:
        super().__init__()
        flat = input.kind != "picture"
        self.shape, planes = input.shape, input.shape[0] if len(input.shape) > 1 else 1
        self.height, self.width = 1 if flat else input.height, input.shape[-1]
        rows, columns = (max(1, ceil((side - 12) / 4)) for side in (self.height, self.width))
        kernel, stride, more = ((1, 5), (1, 2), (0, 1)) if flat else (5, 2, 1)
        self.linear = nn.Linear(dim, 64 * rows * columns)
        self.planes = nn.Unflatten(1, (64, rows, columns))
        self.first = nn.ConvTranspose2d(64, 32, kernel, stride, output_padding=more)
        self.second = nn.ConvTranspose2d(32, planes, kernel, stride, output_padding=more)

    def forward(self, z: Tensor) -> Tensor:
        x = self.second(torch.relu(self.first(self.planes(self.linear(z)))))
        cropped: Tensor = x[:, :, : self.height, : self.width]
        return cropped.reshape(len(z), *self.shape)


class Estimator(nn.Module):
    """Features [N, d] -> mean and log-variance [N, 2d] of a Gaussian over the other feature: two networks d -> 128 -> d.

    The log-variance ends in `end`: "relu", or "tanh", which limits it to -1..1.
    """

    def __init__(self, dim: int, end: str) -> None:
        super().__init__()
        last = nn.ReLU() if end == "relu" else nn.Tanh()
        self.mean = nn.Sequential(nn.Linear(dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, dim))
        self.log_variance = nn.Sequential(nn.Linear(dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, dim), last)

    def forward(self, z: Tensor) -> Tensor:
        return torch.cat([self.mean(z), self.log_variance(z)], dim=1)


@dataclass(frozen=True)
class FedRIR(Method):
    """Shared extractor; personal specific extractor, decoder, estimator q, head on both features, and the states of their optimisers."""

    mcsl: bool = hyper(True, "train the specific extractor (s1); without: Table 5", source="[P]")
    mask: float = hyper(0.6, "share of 4x4 patches that is hidden; 0: none", low=0, high=1, source="[P]")
    kld_weight: float = hyper(0.0, "w, weight of the KL term in s1", low=0, source="none [P]; 0.1 [C]")
    id_weight: float = hyper(0.01, "λ, weight of the bound", low=0, source="by validation [D]; 1 [P]")
    id_objective: str = hyper("vclub", "nll_joint: official code [C]", choices=tuple(OBJECTIVES))
    id_variance: str = hyper("tanh", "end of q's log-variance [C]; relu [P]", choices=("tanh", "relu"))
    id_clamp: bool = hyper(True, "a negative bound counts as 0, else vclub diverges", source="[D]")
    title = "FedRIR"
    citation = "Huang et al., WWW 2025"
    family = "shared and personal extractor"
    grid = {"id_weight": (0.01, 0.1, 1.0), "mask": (0.4, 0.6, 0.8)}
    parts = {
        "extractor": shared(),
        "specific_extractor": personal(specific_extractor),
        "decoder": personal(lambda net, method: Decoder(net.feature_dim, net.input)),
        "estimator": personal(lambda net, method: Estimator(net.feature_dim, method.id_variance)),
        "head": personal(lambda net, method: nn.Linear(2 * net.feature_dim, net.classes)),  # on both features
        **{name: personal() for name in STATES},
    }
    batch_norm = BatchNorm.LOCAL_STATS
    head_tier = HeadTier("adapted", "head on the shared extractor alone")
    measures = ("fedrir.vclub", "fedrir.feature_std", "fedrir.r_squared")
    usual_optimiser = OptimiserConfig("adam", 0.01)
    deviations = (
        "q is fitted by likelihood (paper: with the bound), a negative bound counts as 0; λ and the usual rate are 0.01 (paper: 1, 5e-4);"
        " q's log-variance ends in tanh, KL is an option (both: code); the frozen specific extractor infers (code: its BatchNorm moves)"
    )

    def init_own(self, client: str) -> Parts:
        w = {name: {part: self.net.parts[part].init() for part in parts} for name, parts in STATES.items()}
        states = {name: self.optimiser.init(tree.parameters(parts)) for name, parts in w.items()}
        return {**super().init_own(client), **{name: tree.flat(state) for name, state in states.items()}}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        net, opt, epochs, fill = self.net, self.optimiser, self.epochs, self.reconstruction
        q_loss, bound = OBJECTIVES[self.id_objective]
        s1 = {name: own[name] for name in STATES["s1_state"]}
        q, w = {"estimator": own["estimator"]}, {"extractor": down["extractor"], "head": own["head"]}
        s1_state, q_state, w_state = (
            tree.shaped(own[name], opt.init(tree.parameters(parts)))
            for name, parts in zip(STATES, (s1, q, w), strict=True)
        )
        if self.mcsl:
            s1, s1_state = fit_from(s1_state, fill, s1, data, stage="s1", epochs=epochs, optimiser=opt)

        def step(carry: tuple[Parts, Any, Parts, Any], batch: Batch) -> tuple[Parts, Any, Parts, Any]:
            (q, q_state, w, w_state), f_cs = carry, specific_feature(net, s1, batch.x)

            def explain(q: Parts, batch: Batch) -> Tensor:  # s2a
                f_g = net.extractor(tree.clone(w["extractor"]), batch.x)
                return self.information(q_loss, q, f_g, f_cs, batch.mask)

            def separate(w: Parts, batch: Batch) -> Tensor:  # s2b
                f_g = net.extractor(w["extractor"], batch.x)
                error = cross_entropy(net.head(w["head"], torch.cat([f_g, f_cs], dim=1)), batch.y, batch.mask)
                return error + self.id_weight * self.information(bound, {**q, **w}, f_g, f_cs, batch.mask)

            if q_loss is bound:
                grads = gradient(separate, {**q, **w}, batch)
                q, q_state = apply_gradient(q, grads, q_state, opt)
                w, w_state = apply_gradient(w, grads, w_state, opt)
            else:
                q, q_state = descend(explain, q, q_state, batch, opt)
                w, w_state = descend(separate, w, w_state, batch, opt)
            return q, q_state, w, w_state

        carry, norm = (q, q_state, w, w_state), tree.has_buffers(w)
        q, q_state, w, w_state = scan(step, carry, data, stage="s2", epochs=epochs, norm=norm)
        states = zip(STATES, (s1_state, q_state, w_state), strict=True)
        own = {**s1, **q, "head": w["head"], **{name: tree.flat(state) for name, state in states}}
        return {"extractor": w["extractor"]}, own

    def reconstruction(self, w: Parts, batch: Batch) -> Tensor:
        """Loss of s1. Hidden patches get the mean pixel, which is 0 after normalisation; the target is the normalised image."""
        masked = hide_patches(batch.x, fold(batch.key, 1), self.mask, constant(self.net.input.mean, batch.x))
        mean, log_variance = halves(self.net.specific_extractor(w["specific_extractor"], masked))
        z = mean + torch.exp(log_variance / 2) * normal(fold(batch.key, 2), *mean.shape)
        error = self.net.decoder(w["decoder"], z) - normalised(batch.x, self.net.input)
        loss = (error**2).flatten(1).mean(1) + self.kld_weight * gaussian_kl(mean, log_variance)
        return masked_mean(loss, batch.mask)

    def information(self, loss: Any, q: Parts, f_g: Tensor, f_cs: Tensor, mask: Tensor | None) -> Tensor:
        """A loss of OBJECTIVES for q(f_g | f_cs), or q(f_cs | f_g) with "nll_joint"."""
        if loss is None:
            return f_g.new_zeros(())
        y, given = (f_cs, f_g) if self.id_objective == "nll_joint" else (f_g, f_cs)
        value: Tensor = loss(y, *halves(self.net.estimator(q["estimator"], given)), mask)
        clamp = self.id_clamp and self.id_objective == "vclub" and loss is vclub
        return value.clamp(min=0) if clamp else value

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        both = torch.cat([self.features(parts, x), specific_feature(self.net, parts, x)], dim=1)
        return self.net.head.frozen(parts["head"], both)

    def measure(self, parts: Parts, data: Batches) -> dict[str, Tensor]:
        """How much the specific feature tells about the shared one, on a client's training images.

        vCLUB per batch as in training but never clamped; std of the shared feature; with more than 2d images the share R² of its variance
        that is linear in the specific feature.
        """
        net = self.net
        f_g = data.features(net.extractor, parts["extractor"]).x
        f_cs = data.mapped(lambda x: specific_feature(net, parts, x)).x
        batches = zip(f_g.split(data.batch_size), f_cs.split(data.batch_size), strict=True)
        bounds = [vclub(g, *halves(net.estimator(parts["estimator"], cs))) * len(g) for g, cs in batches]
        numbers = {
            "fedrir.vclub": torch.stack(bounds).sum() / len(f_g),
            "fedrir.feature_std": f_g.std(0, correction=0).mean(),
        }
        # with fewer images, chance alone explains most of the variance
        enough = len(f_g) > 2 * net.feature_dim
        if enough and torch.cat([f_g, f_cs]).isfinite().all():  # an unclamped bound may diverge
            numbers["fedrir.r_squared"] = explained(f_g, f_cs)
        return numbers


def explained(f_g: Tensor, f_cs: Tensor) -> Tensor:
    """The share R² of the variance of f_g [N, d] that is linear in f_cs [N, d], by least squares."""
    given, target = ((z - z.mean(0)).cpu() for z in (f_cs, f_g))  # a GPU's solver requires full rank
    residual = target - given @ torch.linalg.lstsq(given, target).solution
    share: Tensor = 1 - (residual**2).sum() / (target**2).sum()
    return share
