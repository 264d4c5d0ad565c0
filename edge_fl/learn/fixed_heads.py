"""Heads that nobody trains, drawn from the seed: no two clients can disagree on them, and nobody has to send them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from edge_fl.errors import MethodError
from edge_fl.learn.losses import simplex_etf
from edge_fl.learn.network.part import Net, shared
from edge_fl.learn.tree import Params


def orthonormal_head(net: Net, method: object = None) -> nn.Module:
    """Features [N, d] -> logits [N, C] by C orthonormal rows. Raises MethodError for fewer features than classes."""
    if net.feature_dim < net.classes:
        raise MethodError(
            f"a head of orthonormal rows: {net.feature_dim} features for {net.classes} classes, expected at least as many; "
            "nothing was started"
        )
    head = nn.Linear(net.feature_dim, net.classes, bias=False)
    nn.init.orthogonal_(head.weight)
    return head


def to_frame(net: Net, method: object = None) -> nn.Module:
    """Features [N, d] -> [N, e], as wide as a frame of one direction for each class needs them."""
    return nn.Linear(net.feature_dim, _width(net))


def frame_head(net: Net, method: object = None) -> nn.Module:
    """What `to_frame` gives [N, e] -> logits [N, C] by the columns of a simplex equiangular tight frame."""
    head = nn.Linear(_width(net), net.classes, bias=False)
    frame = simplex_etf(_width(net), net.classes, torch.randn(_width(net), net.classes))
    head.weight = nn.Parameter(frame.T.contiguous())
    return head


def calibrated(gram: Tensor, moment: Tensor, ridge: float) -> Params:
    """The head of least squares from sums over samples, (Σ z zᵀ + λ I)⁻¹ Σ z yᵀ, solved in float64 (SphereFed)."""
    held = ridge * torch.eye(len(gram), dtype=torch.float64, device=gram.device)
    weight = torch.linalg.solve(gram.double() + held, moment.double())
    return {"weight": weight.T.float().contiguous()}


def _width(net: Net) -> int:
    return max(net.feature_dim, net.classes)


FRAME = {"projection": shared(to_frame), "head": shared(frame_head)}  # as a method declares the two
