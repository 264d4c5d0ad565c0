"""The steps of federated learning as every engine calls them: a method's pure functions inside its BatchNorm policy and its checks.

Simulation and devices run exactly these; nothing else calls `local_update` or `aggregate`.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from edge_fl.errors import RunError
from edge_fl.learn.batches import Batches
from edge_fl.learn.mean import Update
from edge_fl.learn.tree import Parts, first_not_finite, merge
from edge_fl.methods import norm
from edge_fl.methods.method import Method


def start(method: Method) -> Parts:
    """The server's parts before round 1."""
    return method.init_shared()


def start_own(method: Method, client: str) -> Parts:
    """A client's personal parts before its first round."""
    return {**method.init_own(client), **norm.own_at_start(method)}


def broadcast(method: Method, shared: Parts, client: str) -> Parts:
    """What travels down to one client."""
    return norm.stripped(method, method.broadcast(shared, client))


def train(method: Method, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
    """One local update -> (what travels up, the client's new personal parts). Raises RunError when it diverged."""
    return _client_step(method, method.local_update, "local update", down, own, data)


def personalise(method: Method, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
    """The closing step of one client -> (what travels up, its personal parts)."""
    return _client_step(method, method.personalise, "personalise", down, own, data)


def aggregate(method: Method, shared: Parts, updates: Iterable[Update]) -> Parts:
    """The server's step over one round's updates, in ascending client id."""
    exports = norm.ExportMean()
    aggregated = method.aggregate(shared, exports.peel(updates, uniform=method.uniform))
    return {**aggregated, **exports.value()}


def finalise(method: Method, shared: Parts, updates: Iterable[Update]) -> Parts:
    """The server's closing step."""
    return method.finalise(shared, updates)


def predict(method: Method, down: Parts, own: Parts, x: Tensor) -> Tensor:
    """Personalised logits [N, C] of a client that received `down` and owns `own`."""
    return method.predict(merge(norm.restored(down, own), own), x)


def predict_global(method: Method, shared: Parts, x: Tensor) -> Tensor | None:
    """Logits [N, C] of the global model as it would be exported, or None."""
    return method.predict_global(norm.for_export(shared), x)


def exported_features(method: Method, shared: Parts, x: Tensor) -> Tensor:
    """What the exported extractor computes, [N, C, H, W] -> [N, d]."""
    return method.features(norm.for_export(shared), x)


def _client_step(method: Method, step, name: str, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:  # type: ignore[no-untyped-def]
    kept = {key: params for key, params in own.items() if key.endswith(norm.OWN)}
    up, new = step(norm.restored(down, own), {k: p for k, p in own.items() if k not in kept}, data)
    up, own_norm = norm.separated(method, up)
    if broken := first_not_finite(up) or first_not_finite(new):
        raise RunError(
            f"{method.title}, client {data.client or '?'}, round {data.round}: {name} gave NaN or Infinity in {broken}; "
            "the update was not used (lower the learning rate?)"
        )
    return up, {**kept, **new, **own_norm}
