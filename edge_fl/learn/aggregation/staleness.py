"""Staleness correction of late updates: their change is applied to the newest parts with a weight that decreases with the delay.

J. Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation" (FedBuff), AISTATS 2022, Algorithm 1 and section 5: the
server adds the mean over a buffer of s(τ) Δ_i, where Δ_i is client i's change, τ how many aggregates ago it began, and
s(τ) = 1/sqrt(1 + τ). Here an update becomes w + s(τ) Δ_i on the newest w, so that the mean that any method takes of them is the same.
"""

import math
from dataclasses import replace

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Params, Parts


def weight(staleness: int) -> float:
    """s(τ) = 1/sqrt(1 + τ) (FedBuff, section 5)."""
    return 1.0 / math.sqrt(1.0 + staleness)


def moved(update: Update, shared: Parts) -> Update:
    """`shared` plus s(τ) times the update's change; an update that is not late (no `start`) is returned unchanged.

    Integer buffers and tensors that are not in the broadcast stay as sent.
    """
    if update.start is None:
        return update
    start, s = update.start, weight(update.staleness)
    parts = {
        name: _moved(params, start[name], shared[name], s) if name in start and name in shared else params
        for name, params in update.parts.items()
    }
    return replace(update, parts=parts, start=None)


def _moved(sent: Params, start: Params, newest: Params, s: float) -> Params:
    return {
        name: (newest[name].double() + s * (tensor.double() - start[name].double())).to(tensor.dtype)
        if tensor.is_floating_point() and name in start and name in newest
        else tensor
        for name, tensor in sent.items()
    }
