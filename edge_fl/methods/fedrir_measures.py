"""FedRIR's own numbers: how much the specific feature tells about the shared one, on a client's training images."""

from __future__ import annotations

import torch
from torch import Tensor

from edge_fl.learn.batches import Batches
from edge_fl.learn.losses import vclub
from edge_fl.learn.network.part import Net
from edge_fl.learn.tree import Parts
from edge_fl.methods.fedrir_networks import halves, specific_feature

MEASURES = ("fedrir.vclub", "fedrir.feature_std", "fedrir.r_squared")


def separation(net: Net, parts: Parts, data: Batches) -> dict[str, Tensor]:
    """vCLUB per batch as in training but never clamped; std of the shared feature; and with more than 2d images the share R² of its
    variance that is linear in the specific feature.
    """
    f_g = data.features(net.extractor, parts["extractor"]).x
    f_cs = data.mapped(lambda x: specific_feature(net, parts, x)).x
    batches = zip(f_g.split(data.batch_size), f_cs.split(data.batch_size), strict=True)
    bounds = [vclub(g, *halves(net.estimator(parts["estimator"], cs))) * len(g) for g, cs in batches]
    numbers = {
        "fedrir.vclub": torch.stack(bounds).sum() / len(f_g),
        "fedrir.feature_std": f_g.std(0, correction=0).mean(),
    }
    enough = len(f_g) > 2 * net.feature_dim  # with fewer images, chance alone explains most of the variance
    if enough and torch.cat([f_g, f_cs]).isfinite().all():  # an unclamped bound may diverge
        numbers["fedrir.r_squared"] = explained(f_g, f_cs)
    return numbers


def explained(f_g: Tensor, f_cs: Tensor) -> Tensor:
    """The share R² of the variance of f_g [N, d] that is linear in f_cs [N, d], by least squares."""
    given, target = ((z - z.mean(0)).cpu() for z in (f_cs, f_g))  # a GPU's solver requires full rank
    residual = target - given @ torch.linalg.lstsq(given, target).solution
    share: Tensor = 1 - (residual**2).sum() / (target**2).sum()
    return share
