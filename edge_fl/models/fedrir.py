"""FedRIR's networks beside the shared extractor (METHODS.md 3.3): a specific extractor of the same kind, its decoder, an estimator of
mutual information. With `cnn2-bn` they have the sizes of the official code; any other extractor gets companions of its own sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor, nn

from edge_fl.config import InputSpec
from edge_fl.learn.augment import hide_patches
from edge_fl.learn.batches import Batch, Batches
from edge_fl.learn.losses import gaussian_kl, gaussian_nll, masked_mean, vclub
from edge_fl.learn.network.part import Net, optimiser_state, personal
from edge_fl.learn.random import fold, normal
from edge_fl.learn.tree import Parts
from edge_fl.models.normalise import constant, normalised

# (net, q, f_g, f_cs, mask) -> scalar
Objective = Callable[[Net, Parts, Tensor, Tensor, Tensor | None], Tensor]
HIDDEN = 128  # width inside the estimator


def specific_extractor(net: Net, method: object = None) -> nn.Module:
    """The shared extractor's architecture with 2d outputs: mean and log-variance of the client's own feature."""
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


def decoder(net: Net, method: object = None) -> nn.Module:
    """Features [N, d] -> normalised images [N, C, H, W]."""
    return Decoder(net.feature_dim, net.input)


def estimator(net: Net, method: object = None) -> nn.Module:
    """Features [N, d] -> mean and log-variance [N, 2d] of a Gaussian over the other feature."""
    return Estimator(net.feature_dim)


def wide_head(net: Net, method: object = None) -> nn.Module:
    """Both features side by side [N, 2d] -> logits [N, C]."""
    return nn.Linear(2 * net.feature_dim, net.classes)


def reconstruction(net: Net, share: float, kld_weight: float, w: Parts, batch: Batch) -> Tensor:
    """Variational autoencoder on masked images: squared error per pixel plus weighted KL, mean over the batch (FedRIR, Eqs. 4 and 5).

    Hidden patches get the mean pixel, which is 0 once normalised; the error is that of normalised images.
    """
    seen = hide_patches(batch.x, fold(batch.key, 1), share, constant(net.input.mean, batch.x))
    mean, log_variance = halves(net.specific_extractor(w["specific_extractor"], seen))
    z = mean + torch.exp(log_variance / 2) * normal(fold(batch.key, 2), *mean.shape)
    error = net.decoder(w["decoder"], z) - normalised(batch.x, net.input)
    return masked_mean(
        (error**2).flatten(1).mean(1) + kld_weight * gaussian_kl(mean, log_variance), batch.mask
    )


def specific_feature(net: Net, own: Parts, x: Tensor) -> Tensor:
    """What a trained specific extractor makes of whole images: the mean [N, d]."""
    return halves(net.specific_extractor.frozen(own["specific_extractor"], x))[0]


def halves(gaussian: Tensor) -> tuple[Tensor, Tensor]:
    """[N, 2d] -> mean and log-variance, [N, d] each."""
    mean, log_variance = gaussian.chunk(2, dim=1)
    return mean, log_variance


def likelihood(net: Net, q: Parts, f_g: Tensor, f_cs: Tensor, mask: Tensor | None) -> Tensor:
    """How badly q explains the shared feature by the specific one: its negative log-likelihood."""
    return gaussian_nll(f_g, *halves(net.estimator(q["estimator"], f_cs)), mask)


def bound(net: Net, q: Parts, f_g: Tensor, f_cs: Tensor, mask: Tensor | None) -> Tensor:
    """vCLUB, an upper bound of the features' mutual information when q is right (the paper's L_id)."""
    return vclub(f_g, *halves(net.estimator(q["estimator"], f_cs)), mask)


def official(net: Net, q: Parts, f_g: Tensor, f_cs: Tensor, mask: Tensor | None) -> Tensor:
    """What the official code minimises instead: the negative log-likelihood of the specific feature given the shared one."""
    return gaussian_nll(f_cs, *halves(net.estimator(q["estimator"], f_g)), mask)


def nothing(net: Net, q: Parts, f_g: Tensor, f_cs: Tensor, mask: Tensor | None) -> Tensor:
    """No bound at all."""
    return f_g.new_zeros(())


def clamped(net: Net, q: Parts, f_g: Tensor, f_cs: Tensor, mask: Tensor | None) -> Tensor:
    """The bound, at least 0 as mutual information is: below 0, q only lags behind, and the extractor would exploit it."""
    return bound(net, q, f_g, f_cs, mask).clamp(min=0)


OBJECTIVES: dict[str, tuple[Objective, Objective]] = {
    "vclub": (likelihood, bound),
    "nll_joint": (official, official),
    "joint_literal": (bound, bound),
    "none": (nothing, nothing),
}
"""What the estimator q minimises (stage 2a), and what the extractor minimises beside its loss (stage 2b). Where that is the same, there is
no alternation: one step moves both by the gradient of the extractor's whole loss."""


def objective(name: str, clamp: bool) -> tuple[Objective, Objective]:
    """The pair of OBJECTIVES; vclub is bounded below by 0 when it is to be clamped."""
    fitted, avoided = OBJECTIVES[name]
    return fitted, clamped if clamp and name == "vclub" else avoided


def separation(net: Net, parts: Parts, data: Batches) -> dict[str, Tensor]:
    """How far the two features of a client's images are apart: vCLUB by the batch as in training, but never clamped; the share R² of the
    shared feature's variance that is linear in the specific one, where there are images enough to tell; the shared one's std.
    """
    f_g = data.features(net.extractor, parts["extractor"]).x
    f_cs = data.mapped(lambda x: specific_feature(net, parts, x)).x
    batches = zip(f_g.split(data.batch_size), f_cs.split(data.batch_size), strict=True)
    leak = torch.stack([bound(net, parts, g, cs, None) * len(g) for g, cs in batches]).sum() / len(f_g)
    found = {"fedrir.vclub": leak, "fedrir.feature_std": f_g.std(0, correction=0).mean()}
    enough = len(f_g) > 2 * net.feature_dim  # with fewer, chance alone explains most of it
    if enough and torch.cat([f_g, f_cs]).isfinite().all():  # a bound that is not clamped may diverge
        found["fedrir.r_squared"] = explained(f_g, f_cs)
    return found


def explained(f_g: Tensor, f_cs: Tensor) -> Tensor:
    """The share R² of the variance of f_g [N, d] that is linear in f_cs [N, d], by least squares."""
    given, asked = ((z - z.mean(0)).cpu() for z in (f_cs, f_g))  # a GPU's solver wants full rank
    rest = asked - given @ torch.linalg.lstsq(given, asked).solution
    share: Tensor = 1 - (rest**2).sum() / (asked**2).sum()
    return share


class Decoder(nn.Module):
    """Linear to 64 small planes, then two transposed convolutions 5x5 of stride 2; sides that are not 4s + 12 are cropped."""

    def __init__(self, dim: int, input: InputSpec) -> None:
        super().__init__()
        self.height, self.width = input.height, input.width
        rows, columns = (max(1, ceil((side - 12) / 4)) for side in (input.height, input.width))
        self.linear = nn.Linear(dim, 64 * rows * columns)
        self.planes = nn.Unflatten(1, (64, rows, columns))
        self.first = nn.ConvTranspose2d(64, 32, 5, stride=2, output_padding=1)
        self.second = nn.ConvTranspose2d(32, input.channels, 5, stride=2, output_padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.second(torch.relu(self.first(self.planes(self.linear(z)))))
        cropped: Tensor = x[:, :, : self.height, : self.width]
        return cropped


class Estimator(nn.Module):
    """Two networks d -> 128 -> d; that of the log-variance ends in tanh, so that no variance gets extreme."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, dim))
        self.log_variance = nn.Sequential(
            nn.Linear(dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, dim), nn.Tanh()
        )

    def forward(self, z: Tensor) -> Tensor:
        return torch.cat([self.mean(z), self.log_variance(z)], dim=1)


PARTS = {
    "specific_extractor": personal(specific_extractor, salted=True),
    "decoder": personal(decoder, salted=True),
    "estimator": personal(estimator, salted=True),
    "head": personal(wide_head, salted=True),
    "s1_state": optimiser_state("specific_extractor", "decoder"),
    "q_state": optimiser_state("estimator"),
    "s2_state": optimiser_state("extractor", "head"),
}
