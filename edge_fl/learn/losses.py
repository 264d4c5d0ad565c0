"""Losses of the methods as pure functions (docs/methods-formulas.md, F1 to F8).

Every loss is a mean over the batch. `mask` [B] is 1 for samples and 0 for padding; None: no padding.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F

from edge_fl.learn import tree
from edge_fl.learn.tree import Params


def masked_mean(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean of values [B] over samples; 0 without samples."""
    if mask is None:
        return values.mean()
    return torch.where(mask > 0, values, 0.0).sum() / mask.sum().clamp(min=1)  # a padded row may be infinite


def squared_error(a: Tensor, b: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over samples of the mean squared difference of a and b [B, D]."""
    return masked_mean(((a - b) ** 2).mean(1), mask)


def one_hot(y: Tensor, classes: int) -> Tensor:
    """[..., B] -> [..., B, C] float32 by comparison (F.one_hot does not run under vmap)."""
    return (y.unsqueeze(-1) == torch.arange(classes, device=y.device)).to(torch.float32)


def cross_entropy(logits: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Cross-entropy of logits [B, C] with labels [B]."""
    if mask is None and not is_functorch_wrapped_tensor(logits):
        return F.cross_entropy(logits, y)
    each = -F.log_softmax(logits, dim=-1).gather(-1, y[:, None])[:, 0]  # torch's own is slow under vmap
    return masked_mean(each, mask)


def balanced_cross_entropy(logits: Tensor, y: Tensor, counts: Tensor, mask: Tensor | None = None) -> Tensor:
    """Balanced softmax with local class counts [C]; a class with count 0 gets probability 0 (F7)."""
    return cross_entropy(logits + torch.log(counts), y, mask)


def kl(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """KL(teacher || student) of logits [B, C], temperature 1; the caller detaches the teacher (F4)."""
    log_teacher = F.log_softmax(teacher, dim=-1)
    return masked_mean((log_teacher.exp() * (log_teacher - F.log_softmax(student, dim=-1))).sum(-1), mask)


def proximal(params: Any, reference: Any, weight: float) -> Tensor | float:
    """weight/2 * squared distance over parameters, not buffers (F6); the number 0.0 when weight is 0."""
    if weight == 0.0:
        return 0.0
    held, fixed = tree.parameters(params), tree.parameters(reference)
    return 0.5 * weight * torch.stack([((t - fixed[path]) ** 2).sum() for path, t in held.items()]).sum()


def supcon(u: Tensor, y: Tensor, temperature: float, mask: Tensor | None = None) -> Tensor:
    """Supervised contrastive loss L_out of unit vectors u [B, d] (Khosla et al. 2020); 0 for anchors without positives (F1)."""
    scores, positive, real = _pairs(u, y, temperature, mask)
    log_probability = scores - torch.logsumexp(scores, dim=1, keepdim=True)
    number = positive.sum(1)
    per_anchor = -torch.where(positive, log_probability, 0.0).sum(1) / number.clamp(min=1)
    return masked_mean(per_anchor, real)


def supcon_in(u: Tensor, y: Tensor, temperature: float, mask: Tensor | None = None) -> Tensor:
    """Supervised contrastive loss L_in, the log outside the mean over positives; mean over anchors with positives (F2)."""
    scores, positive, real = _pairs(u, y, temperature, mask)
    number = positive.sum(1)
    lowest = torch.finfo(scores.dtype).min
    on_positives = torch.logsumexp(torch.where(positive, scores, lowest), dim=1)
    per_anchor = (
        torch.logsumexp(scores, dim=1) - on_positives + torch.log(number.clamp(min=1).to(scores.dtype))
    )
    valid = (number > 0).to(scores.dtype) * real
    return masked_mean(torch.where(number > 0, per_anchor, 0.0), valid)


def _pairs(u: Tensor, y: Tensor, temperature: float, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Scores [B, B] with diagonal and padding set to the lowest float; positive pairs [B, B]; mask of samples [B]."""
    real = torch.ones_like(u[:, 0]) if mask is None else mask.to(u.dtype)
    other = ~torch.eye(len(y), dtype=torch.bool, device=u.device) & (real > 0)[None, :]
    scores = torch.where(other, u @ u.T / temperature, torch.finfo(u.dtype).min)
    return scores, (y[:, None] == y[None, :]) & other, real


def prototype_contrast(
    features: Tensor, y: Tensor, prototypes: Params, temperature: float, mask: Tensor | None = None
) -> Tensor:
    """InfoNCE of features and detached prototypes {"mean" [C, k], "count" [C]}; samples of absent classes are skipped (F3)."""
    known = ((prototypes["count"] > 0)[y] & (y >= 0)).to(features.dtype)  # a label below 0 is padding
    scores = unit(features) @ unit(prototypes["mean"].detach()).T / temperature
    scores = torch.where(prototypes["count"][None, :] > 0, scores, torch.finfo(scores.dtype).min)
    losses = torch.where(known > 0, F.cross_entropy(scores, y.clamp(min=0), reduction="none"), 0.0)
    return masked_mean(losses, known if mask is None else known * mask)


def model_contrast(
    z: Tensor, near: Tensor, far: Tensor, temperature: float, mask: Tensor | None = None
) -> Tensor:
    """-log of exp(cos(z, near)/τ) over its sum with exp(cos(z, far)/τ), features [B, d] (MOON Eq. 3)."""
    difference = F.cosine_similarity(z, far) - F.cosine_similarity(z, near)
    return masked_mean(F.softplus(difference / temperature), mask)


def gaussian_log_density(y: Tensor, mean: Tensor, log_variance: Tensor) -> Tensor:
    """log N(y; mean, diag exp(log_variance)), summed over the last dimension (F5)."""
    return -0.5 * ((y - mean) ** 2 * torch.exp(-log_variance) + log_variance + math.log(2 * math.pi)).sum(-1)


def gaussian_nll(y: Tensor, mean: Tensor, log_variance: Tensor, mask: Tensor | None = None) -> Tensor:
    """Negative log-likelihood of y [B, d] under N(mean, diag exp(log_variance)), mean over the batch (F5)."""
    return masked_mean(-gaussian_log_density(y, mean, log_variance), mask)


def gaussian_kl(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL of N(mean, diag exp(log_variance)) from the standard normal, [B, d] -> [B], summed over d (Kingma and Welling 2014)."""
    return 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(-1)


def vclub(y: Tensor, mean: Tensor, log_variance: Tensor, mask: Tensor | None = None) -> Tensor:
    """Variational CLUB of y [B, d] under q(y|x) = N(mean, exp(log_variance)), all pairs including i = j (Cheng et al. 2020, F5)."""
    real = torch.ones_like(y[:, 0]) if mask is None else mask.to(y.dtype)
    every_pair = gaussian_log_density(y[None, :, :], mean[:, None, :], log_variance[:, None, :])
    weight = real[:, None] * real[None, :] / real.sum().clamp(min=1) ** 2
    return masked_mean(gaussian_log_density(y, mean, log_variance), real) - (every_pair * weight).sum()


def mmd(
    x: Tensor, y: Tensor, mask: Tensor | None = None, bandwidths: tuple[float, ...] = (10, 15, 20, 50)
) -> Tensor:
    """Squared maximum mean discrepancy of x and y [B, d], biased, Gaussian kernels exp(-|.|^2 / 2s) (F8)."""
    real = torch.ones_like(x[:, 0]) if mask is None else mask.to(x.dtype)
    weight = real[:, None] * real[None, :] / real.sum().clamp(min=1) ** 2

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        squared = ((a[:, None, :] - b[None, :, :]) ** 2).sum(-1)
        return torch.stack([torch.exp(-squared / (2 * s)) for s in bandwidths]).sum(0)

    return ((kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)) * weight).sum()


def unit(z: Tensor) -> Tensor:
    """z / |z| along the last dimension."""
    return F.normalize(z, dim=-1)
