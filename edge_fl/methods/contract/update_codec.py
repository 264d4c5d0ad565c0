"""Update codec: the transformation of an update for transport, on the client, and its inverse on the server.

    local update -> difference to the broadcast -> clip, add noise -> compress -> ... -> decompress -> aggregate

It wraps every method inside every engine, so that a simulation sends the same bytes as devices. It acts on the parameters that the client
received; everything else (class means, buffers, tensors without a counterpart in the broadcast) travels unchanged, which privacy forbids.
Noise is added first, so compression and the residuals of error feedback only see values that are already private.
"""

import torch

from edge_fl.errors import MethodError, PrivacyError
from edge_fl.learn import tree
from edge_fl.learn.codec import differential_privacy
from edge_fl.learn.codec.compression import AT, CODECS, SCALE
from edge_fl.learn.codec.differential_privacy import Noise
from edge_fl.learn.random import fold, key_of
from edge_fl.learn.tree import BUFFER, Parts
from edge_fl.methods.contract import norm
from edge_fl.methods.contract.method import Method
from edge_fl.metrics import EPSILON

RESIDUAL = ".residual"  # suffix of a part's name: what error feedback keeps for the next update
PRIVACY, SPENT = "privacy", "spent"  # the personal part and its tensor: μ² that a client's updates have spent


def sent(
    method: Method, down: Parts, up: Parts, own: Parts, seed: int, noise: Noise | None = None
) -> tuple[Parts, Parts]:
    """Encode an update -> (parts for transport, the client's personal parts afterwards). Randomness comes from `seed`, noise from `noise`
    if given. Raises PrivacyError if the update would exceed the privacy budget.
    """
    if not up or not (_is_private(method) or method.compression.kind in CODECS):
        return up, own
    bases = _bases(method, down, up)
    change = {part: {name: up[part][name] - base for name, base in bases[part].items()} for part in bases}
    if _is_private(method):
        _require_covered(method, change, up)
        require_budget(method, own)
        change = differential_privacy.released(
            change, method.privacy, noise or differential_privacy.seeded(fold(key_of(seed), 0))
        )
        own = {**own, PRIVACY: {SPENT: own[PRIVACY][SPENT] + differential_privacy.cost(method.privacy)}}
    if method.compression.kind in CODECS:
        return _compressed(method, change, up, own, seed)
    return tree.merge(up, tree.map(torch.add, bases, change)), own


def received(method: Method, down: Parts, up: Parts) -> Parts:
    """Decode the update of a client that had received `down`. Raises ProtocolError for a code that cannot be read."""
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
    """The codec's state on a client before its first update: zero residuals, nothing spent."""
    own: Parts = {}
    if (codec := CODECS.get(method.compression.kind)) and codec.feedback:
        zeros = tree.map(torch.zeros_like, _bases(method, *untrained(method)))
        own = {part + RESIDUAL: params for part, params in zeros.items()}
    if _is_private(method):
        own[PRIVACY] = {SPENT: torch.zeros(())}
    return own


def is_codec_state(part: str) -> bool:
    """Whether a personal part belongs to the codec and not to the method."""
    return part.endswith(RESIDUAL) or part == PRIVACY


def untrained(method: Method) -> tuple[Parts, Parts]:
    """(the first broadcast, the update of a client that learned nothing from it); statistics such as class means are left out."""
    start = method.init_shared()  # where some layers are personal, not the whole network
    networks = {
        name: start.get(name, method.net.parts[name].init())
        for name in method.sent()
        if name in method.net.parts
    }
    up, _ = norm.separated(method, networks)
    return norm.stripped(method, method.broadcast(start, "")), up


def epsilon_spent(method: Method, own: Parts) -> dict[str, float]:
    """Epsilon spent by a client's updates so far, as a metric; empty without privacy."""
    if not _is_private(method):
        return {}
    return {EPSILON: differential_privacy.epsilon(float(own[PRIVACY][SPENT]), method.privacy.delta)}


def budget_exhausted(method: Method, own: Parts) -> bool:
    """Whether a client's next update would exceed its privacy budget."""
    privacy = method.privacy
    if not (_is_private(method) and privacy.budget):
        return False
    after = float(own[PRIVACY][SPENT]) + differential_privacy.cost(privacy)
    return differential_privacy.epsilon(after, privacy.delta) > privacy.budget


def require_budget(method: Method, own: Parts) -> None:
    """Raises PrivacyError when a client's next update would exceed its privacy budget."""
    if budget_exhausted(method, own):
        raise PrivacyError(
            f"{EPSILON} is {epsilon_spent(method, own)[EPSILON]:.3g}, another update would exceed the budget of {method.privacy.budget:g}",
            consequence="nothing was sent, and this client does not train again",
        )


def require_possible(method: Method) -> None:
    """Raises MethodError if the method sends values that noise does not cover, or if the budget is below the cost of one update."""
    if not _is_private(method):
        return
    down, up = untrained(method)
    bare = {name: {"*": torch.zeros(())} for name in method.sent() if name not in method.net.parts}
    _require_covered(method, _bases(method, down, up), {**up, **bare})
    least = differential_privacy.epsilon(differential_privacy.cost(method.privacy), method.privacy.delta)
    if 0 < method.privacy.budget < least:
        raise MethodError(
            f"[privacy] budget = {method.privacy.budget:g}, expected at least {least:.3g}, the cost of one update"
        )


def _is_private(method: Method) -> bool:
    return method.privacy.noise_multiplier > 0


def _bases(method: Method, down: Parts, up: Parts) -> Parts:
    """The received values of the parameters that the codec acts on."""
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
            f"[privacy] {method.title} sends {'.'.join(min(bare))}, which noise does not cover; expected only parameters that the client"
            " received (no BatchNorm statistics, no class means)"
        )


def _compressed(method: Method, change: Parts, up: Parts, own: Parts, seed: int) -> tuple[Parts, Parts]:
    codec, keep, key = CODECS[method.compression.kind], method.compression.keep, fold(key_of(seed), 1)
    packed = {part: {n: t for n, t in up[part].items() if n not in change.get(part, {})} for part in up}
    residuals = {name: dict(params) for name, params in own.items() if name.endswith(RESIDUAL)}
    for number, ((part, name), tensor) in enumerate(sorted(tree.leaves(change).items())):
        residual = residuals.setdefault(part + RESIDUAL, {})
        target = tensor + residual.get(name, 0.0)
        coded = codec.encode(target, keep, fold(key, number))
        packed[part] |= {name + code: t for code, t in coded.items()}
        residual[name] = target - codec.decode(coded, target.shape)
    return packed, {**own, **residuals} if codec.feedback else own
