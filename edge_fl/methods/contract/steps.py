"""The steps of a method as engines and devices call them: its pure functions with BatchNorm policy, checks and update codec applied.

No other code calls a method's `local_update` or `aggregate`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from edge_fl import metrics
from edge_fl.errors import STOPPED, MethodError, RunError
from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.aggregation.screening import Screen
from edge_fl.learn.batches import Batches
from edge_fl.learn.codec.differential_privacy import Noise
from edge_fl.learn.random import seeded
from edge_fl.learn.tree import Parts, first_not_finite, merge
from edge_fl.methods.contract import norm, update_codec
from edge_fl.methods.contract.method import BatchNorm, Method
from edge_fl.seeds import seed_for

CURRENT = "current."  # prefix of the current parts in the broadcast of a comparison
Step = Callable[[Parts, Parts, Batches], tuple[Parts, Parts]]  # (down, own, data) -> (up, own)


def start(method: Method) -> Parts:
    """The server's parts before round 1."""
    return method.init_shared()


def start_own(method: Method, client: str) -> Parts:
    """A client's personal parts before its first round."""
    return {**method.init_own(client), **norm.own_at_start(method), **update_codec.own_at_start(method)}


def broadcast(method: Method, shared: Parts, client: str) -> Parts:
    """The parts that one client receives."""
    return norm.stripped(method, method.broadcast(shared, client))


def trained(method: Method, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
    """Run one local update -> (up, own), to be encoded by `sent`.

    Raises RunError if the update diverged, PrivacyError if the client's privacy budget is exhausted.
    """
    update_codec.require_budget(method, own)
    up, new = local_update(method, down, own, data)
    require_finite(method, data.client, data.round, up, new)
    return up, new


def local_update(method: Method, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
    """`trained` without checks, which depend on values; this part runs under vmap."""
    with seeded_for(method, "train", data):
        return _client_step(method, method.local_update, down, own, data)


def personalise(
    method: Method, down: Parts, own: Parts, data: Batches, noise: Noise | None = None
) -> tuple[Parts, Parts]:
    """Run one client's final personalisation -> (parts to send, its personal parts). Raises as `trained`."""
    with seeded_for(method, "personalise", data):
        up, new = _client_step(method, method.personalise, down, own, data)
    require_finite(method, data.client, data.round, up, new)
    return sent(method, "personalise", down, up, new, data, noise)


def sent(
    method: Method, step: str, down: Parts, up: Parts, own: Parts, data: Batches, noise: Noise | None = None
) -> tuple[Parts, Parts]:
    """Encode the result of a step for transport -> (parts to send, the client's personal parts)."""
    seed = seed_for(data.run, f"transit.{step}", data.round, data.client)  # renaming changes results
    return update_codec.sent(method, down, method.pack(up), own, seed, noise)


def received(method: Method, updates: Iterable[Update], downs: Mapping[str, Parts]) -> Iterator[Update]:
    """Decode and unpack updates for the server's steps; `downs` are this round's broadcasts by client (a late update carries its own)."""
    unpacks = type(method).unpack is not Method.unpack
    for update in updates:
        if update.parts and (unpacks or method.compression.kind != "none"):
            down = downs[update.client] if update.start is None else update.start
            parts = update_codec.received(method, down, update.parts)
            update = replace(update, parts=method.unpack(down, parts))
        yield update


def screen(method: Method, max_norm: float) -> Screen:
    """A screen for a run's updates, which knows the method's networks and what each client received."""
    return Screen(max_norm, method.net.parts.keys(), lambda shared, client: broadcast(method, shared, client))


def aggregate(method: Method, shared: Parts, updates: Iterable[Update]) -> Parts:
    """Aggregate one round's updates, in ascending client id."""
    exports = norm.ExportMean()
    aggregated = method.aggregate(shared, exports.extract(updates, uniform=method.uniform))
    if not isinstance(aggregated, Mapping):
        raise MethodError(
            f"{method.title}: aggregate returned {_kind(aggregated)}, expected a dict of a part's name -> dict of tensors",
            STOPPED,
        )
    return {**aggregated, **exports.value()}


def finalise(method: Method, shared: Parts, updates: Iterable[Update]) -> Parts:
    """Complete the shared parts from the updates of final personalisation."""
    return method.finalise(shared, updates)


def newcomer(method: Method, client: str, down: Parts, own: Parts, data: Batches) -> Parts:
    """The personal parts for prediction; where a client never trained, what it received and its own BatchNorm statistics replace
    initial values (docs/methods.md G16).
    """
    if type(method).before_training is Method.before_training and method.batch_norm is BatchNorm.SYNC:
        return own
    drawn = tree.to_device(start_own(method, client), data.x.device)
    if not tree.same(
        *({k: p for k, p in o.items() if not update_codec.is_codec_state(k)} for o in (own, drawn))
    ):
        return own
    with seeded_for(method, "newcomer", data):
        return norm.estimated(method, down, method.before_training(down, own), data.x)


def predict(method: Method, down: Parts, own: Parts, x: Tensor) -> Tensor:
    """Personalised logits [N, C] of a client with received parts `down` and personal parts `own`."""
    with _seeded_prediction(method, x):
        return _logits(method, method.predict(merge(norm.restored(down, own), own), x), x)


def measure(method: Method, down: Parts, own: Parts, data: Batches) -> dict[str, float]:
    """The method's own numbers for a client, without those that no report may carry; none under privacy, because its budget does not
    cover them. Raises MethodError for a number that the method does not declare.
    """
    if method.privacy.noise_multiplier:
        return {}
    with torch.no_grad(), seeded_for(method, "measure", data):
        numbers = method.measure(merge(norm.restored(down, own), own), data)
    if undeclared := sorted(numbers.keys() - set(method.measures)):
        raise MethodError(
            f"{method.title} measures {undeclared[0]!r}, expected a name that it declares in `measures`"
            f" ({', '.join(method.measures) or 'none'})"
        )
    return {name: float(value) for name, value in numbers.items() if metrics.is_plausible(name, float(value))}


def predict_global(method: Method, shared: Parts, x: Tensor) -> Tensor:
    """Logits [N, C] of the global model as it would be exported. Raises MethodError for a method without one."""
    with _seeded_prediction(method, x):
        logits = method.predict_global(norm.for_export(shared), x)
    if logits is None:
        raise MethodError(f"{method.title} has no global model")
    return _logits(method, logits, x)


def exported_features(method: Method, shared: Parts, x: Tensor) -> Tensor:
    """Features of the exported extractor, [N, C, H, W] -> [N, d]."""
    with _seeded_prediction(method, x):
        return method.features(norm.for_export(shared), x)


def paired(current: Parts, candidate: Parts) -> Parts:
    """The broadcast of a comparison: the candidate's parts, and the current ones under names that begin with CURRENT."""
    return {**candidate, **tree.prefixed(CURRENT, current)}


def unpaired(down: Parts) -> tuple[Parts, Parts]:
    """The inverse of `paired` -> (current, candidate)."""
    candidate = {name: params for name, params in down.items() if not name.startswith(CURRENT)}
    return tree.unprefixed(CURRENT, down), candidate


def require_finite(method: Method, client: str, round: int, *trees: Parts) -> None:
    """Raises RunError with client, round and tensor if a value is NaN or infinite."""
    if broken := next(filter(None, map(first_not_finite, trees)), None):
        raise RunError(
            f"{method.title}, client {client or '?'}, round {round}: the local update has NaN or Infinity in {broken}",
            consequence="the update was not used (lower the learning rate?)",
        )


def seeded_for(method: Method, step: str, data: Batches) -> AbstractContextManager[None]:
    """Context for a client's step: what networks draw by themselves, such as dropout, follows from run, step, round and client."""
    if not method.draws:
        return nullcontext()
    return seeded(seed_for(data.run, f"draws.{step}", data.round, data.client), data.x.device)


def _seeded_prediction(method: Method, x: Tensor) -> AbstractContextManager[None]:
    """Context for a prediction, a function of parts and samples: a layer that draws in inference, too, draws the same each time."""
    if not method.draws or torch.compiler.is_compiling():  # an export has no draws
        return nullcontext()
    return seeded(0, x.device)


def _client_step(method: Method, step: Step, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
    """(up, own) of a step. Raises MethodError for a result of another form, and for a step that changed what it was given."""
    kept = {k: p for k, p in own.items() if k.endswith(norm.OWN) or update_codec.is_codec_state(k)}
    given = norm.restored(down, own), {k: p for k, p in own.items() if k not in kept}
    before = _versions(given)
    result = step(*given, data)
    wrong = _wrong_result(method, result)
    wrong = f"returned {wrong}" if wrong else _changed(before, _versions(given))
    if wrong:
        raise MethodError(f"{method.title}: {getattr(step, '__name__', 'a step')} {wrong}", STOPPED)
    up, new = result
    up, own_norm = norm.separated(method, up)
    return up, {**kept, **new, **own_norm}


def _versions(given: tuple[Parts, Parts]) -> list[dict[str, list[int]]]:
    """How often the tensors of each part were changed in place: other clients, and later steps, get the same ones."""
    return [
        {
            name: [t._version for t in params.values() if not t.is_inference()]
            for name, params in parts.items()
        }
        for parts in given
    ]


def _changed(before: list[dict[str, list[int]]], after: list[dict[str, list[int]]]) -> str:
    """What a step changed of what it was given, and what was expected; empty if nothing."""
    for argument, old, new in zip(("down", "own"), before, after, strict=True):
        if changed := [name for name in {**old, **new} if old.get(name) != new.get(name)]:
            return f"changed {argument}[{changed[0]!r}], which others use too; expected a copy, as of tree.clone({argument})"
    return ""


def _wrong_result(method: Method, result: Any) -> str:
    """What is wrong with the result of a client's step, and what was expected; empty if nothing is."""
    form = "expected (up, own): two dicts of a part's name -> dict of tensors"
    if not (isinstance(result, tuple) and len(result) == 2):
        return f"{_kind(result)}, {form}"
    for half in result:
        if not isinstance(half, Mapping):
            return f"({', '.join(map(_kind, result))}), {form}"
        for name, params in half.items():
            if not (isinstance(params, Mapping) and all(isinstance(t, Tensor) for t in params.values())):
                return f"{_kind(params)} as part {name!r}, {form}"
    up, new = result
    if unknown := sorted(up.keys() - method.parts.keys()):
        return f"the part {unknown[0]!r}, expected parts that it declares: {', '.join(method.parts)}"
    personal = [name for name, spec in method.parts.items() if not spec.travels]
    if missing := [name for name in personal if name not in new]:
        return f"no personal part {missing[0]!r}, expected all that it declares: {', '.join(personal)}"
    return ""


def _logits(method: Method, found: Any, x: Tensor) -> Tensor:
    """Logits [N, C] of the samples x [N, ...]. Raises MethodError for anything else."""
    expected = (len(x), method.net.classes)
    if not isinstance(found, Tensor) or found.shape != expected:
        came = [*found.shape] if isinstance(found, Tensor) else _kind(found)
        raise MethodError(
            f"{method.title}: a prediction is {came}, expected logits {[*expected]}, [samples, classes]",
            STOPPED,
        )
    return found


def _kind(found: Any) -> str:
    return (
        f"{type(found).__name__} of {len(found)}" if isinstance(found, tuple | list) else type(found).__name__
    )
