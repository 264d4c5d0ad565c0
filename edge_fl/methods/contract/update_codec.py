"""An update on its way from a client to the server: made private, then small, by the client, and opened by the server.

    local update -> change against the broadcast -> clip and noise -> compress -> ... -> open -> aggregate

This stands around every method and inside every engine, so that a simulation sends the very bytes that devices send. It acts on the
parameters that a client has received; all else (statistics such as class means, buffers, what has no counterpart in the broadcast) travels
as it is, which privacy does not allow. Noise comes first: what is compressed, and what error feedback keeps for later, has it already, so
that nothing bare ever leaves.
"""

from __future__ import annotations

import torch

from edge_fl.errors import MethodError, PrivacyError
from edge_fl.learn import tree
from edge_fl.learn.codec import privacy as private
from edge_fl.learn.codec.compression import AT, CODECS, SCALE
from edge_fl.learn.codec.privacy import Noise
from edge_fl.learn.random import fold, key_of
from edge_fl.learn.tree import BUFFER, Parts
from edge_fl.methods.contract import norm
from edge_fl.methods.contract.method import Method
from edge_fl.metrics import EPSILON

RESIDUAL = ".residual"  # behind a part's name: what error feedback has kept back of it
LEDGER, SPENT = (
    "privacy",
    "budget_exhausted",
)  # the personal part that knows what a client's updates have told, as μ²


def sent(
    method: Method, down: Parts, up: Parts, own: Parts, seed: int, noise: Noise | None = None
) -> tuple[Parts, Parts]:
    """(an update as it travels, the client's personal parts after it). What is random follows from `seed`, but for `noise` if given.

    Raises PrivacyError when the update would tell more than the budget: then nothing leaves.
    """
    if not up or not (_is_private(method) or method.compression.kind in CODECS):
        return up, own
    bases = _bases(method, down, up)
    change = {part: {name: up[part][name] - base for name, base in bases[part].items()} for part in bases}
    if _is_private(method):
        _require_covered(method, change, up)
        require_budget(method, own)
        change = private.released(change, method.privacy, noise or private.seeded(fold(key_of(seed), 0)))
        own = {**own, LEDGER: {SPENT: own[LEDGER][SPENT] + private.cost(method.privacy)}}
    if method.compression.kind in CODECS:
        return _compressed(method, change, up, own, seed)
    return tree.merge(up, tree.map(torch.add, bases, change)), own


def received(method: Method, down: Parts, up: Parts) -> Parts:
    """The update of a client that had received `down`, opened. Raises ProtocolError for a code that cannot be read."""
    if (codec := CODECS.get(method.compression.kind)) is None:
        return up
    opened = dict(up)
    for part, bases in _bases(method, down, up).items():
        for name, base in bases.items():
            coded = {code: up[part][name + code] for code in ("", SCALE, AT) if name + code in up[part]}
            kept = {key: t for key, t in opened[part].items() if key.removeprefix(name) not in coded}
            opened[part] = {**kept, name: base + codec.decode(coded, base.shape)}
    return opened


def own_at_start(method: Method) -> Parts:
    """What a client remembers from one update to the next, before its first."""
    own: Parts = {}
    if (codec := CODECS.get(method.compression.kind)) and codec.feedback:
        zeros = tree.map(torch.zeros_like, _bases(method, *unlearnt(method)))
        own = {part + RESIDUAL: params for part, params in zeros.items()}
    if _is_private(method):
        own[LEDGER] = {SPENT: torch.zeros(())}
    return own


def is_ours(part: str) -> bool:
    """Whether a personal part is remembered here, and not the method's."""
    return part.endswith(RESIDUAL) or part == LEDGER


def unlearnt(method: Method) -> tuple[Parts, Parts]:
    """The first broadcast, and the update of a client that has learnt nothing from it, statistics apart."""
    start = method.init_shared()  # where some layers are personal, not the whole network
    networks = {
        name: start.get(name, method.net.parts[name].init())
        for name in method.sent()
        if name in method.net.parts
    }
    up, _ = norm.separated(method, networks)
    return norm.stripped(method, method.broadcast(start, "")), up


def told(method: Method, own: Parts) -> dict[str, float]:
    """What a client's updates have told so far, as a metric; nothing without privacy."""
    if not _is_private(method):
        return {}
    return {EPSILON: private.epsilon(float(own[LEDGER][SPENT]), method.privacy.delta)}


def is_spent(method: Method, own: Parts) -> bool:
    """Whether a client's next update would tell more than the budget."""
    privacy = method.privacy
    if not (_is_private(method) and privacy.budget):
        return False
    return private.epsilon(float(own[LEDGER][SPENT]) + private.cost(privacy), privacy.delta) > privacy.budget


def require_budget(method: Method, own: Parts) -> None:
    """Raises PrivacyError when the client's next update would tell more than the budget."""
    if is_spent(method, own):
        raise PrivacyError(
            f"{EPSILON} is {told(method, own)[EPSILON]:.3g}, and one more update would go beyond the budget of"
            f" {method.privacy.budget:g}; nothing was sent, and this client trains no more"
        )


def require_possible(method: Method) -> None:
    """Raises MethodError for a method or a network that sends what noise does not cover, and for a budget below one update."""
    if not _is_private(method):
        return
    down, up = unlearnt(method)
    bare = {name: {"*": torch.zeros(())} for name in method.sent() if name not in method.net.parts}
    _require_covered(method, _bases(method, down, up), {**up, **bare})
    least = private.epsilon(private.cost(method.privacy), method.privacy.delta)
    if 0 < method.privacy.budget < least:
        raise MethodError(
            f"[privacy] budget = {method.privacy.budget:g}: one update tells {least:.3g} already"
        )


def _is_private(method: Method) -> bool:
    return method.privacy.noise_multiplier > 0


def _bases(method: Method, down: Parts, up: Parts) -> Parts:
    """What is acted on of an update, as it was in the broadcast: parameters of networks that the client had received."""
    found = {
        part: {name: t for name, t in down.get(part, {}).items() if name in params and _is_parameter(name, t)}
        for part, params in up.items()
        if part in method.net.parts
    }
    return {part: params for part, params in found.items() if params}


def _is_parameter(name: str, tensor: torch.Tensor) -> bool:
    return not name.startswith(BUFFER) and tensor.dtype is torch.float32 and tensor.numel() > 0


def _require_covered(method: Method, covered: Parts, up: Parts) -> None:
    bare = tree.leaves(up).keys() - tree.leaves(covered).keys()
    if bare:
        raise MethodError(
            f"[privacy] {method.title} sends {'.'.join(min(bare))}, expected parameters that the client had received and nothing else"
            " (no BatchNorm statistics, no class means): noise would not cover it"
        )


def _compressed(method: Method, change: Parts, up: Parts, own: Parts, seed: int) -> tuple[Parts, Parts]:
    codec, keep, key = CODECS[method.compression.kind], method.compression.keep, fold(key_of(seed), 1)
    packed = {part: {n: t for n, t in up[part].items() if n not in change.get(part, {})} for part in up}
    residuals = {name: dict(params) for name, params in own.items() if name.endswith(RESIDUAL)}
    for number, ((part, name), tensor) in enumerate(sorted(tree.leaves(change).items())):
        residual = residuals.setdefault(part + RESIDUAL, {})
        wanted = tensor + residual.get(name, 0.0)
        coded = codec.encode(wanted, keep, fold(key, number))
        packed[part] |= {name + code: t for code, t in coded.items()}
        residual[name] = wanted - codec.decode(coded, wanted.shape)
    return packed, {**own, **residuals} if codec.feedback else own
