"""Parts and nets: a network consists of named parts, each a pure function of its parameters.

A `Part` holds no trained weights: `init` returns initial ones, `part(params, x)` runs with training behaviour (BatchNorm uses the batch and
updates the buffers inside `params`), `part.frozen(params, x)` with inference behaviour. Not thread-safe: a call swaps the parameters in.
"""

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from edge_fl.inputs import InputSpec
from edge_fl.learn.network import precision
from edge_fl.learn.network.chain import layers_of
from edge_fl.learn.network.masked_norm import respect_padding
from edge_fl.learn.random import may_draw, seeded
from edge_fl.learn.tree import BUFFER, Params, parameters
from edge_fl.seeds import seed_for


class Part:
    """One named part of a network.

    norm: the names of its BatchNorm tensors; norm_statistics: those of running statistics only.
    chain: its layers if it is a plain chain (`edge_fl.learn.network.chain`), else None.
    layers: the names of each layer's tensors, first layer first; BatchNorm belongs to the layer before it.
    draws: whether a call may draw from torch's global generators; callers seed these (`edge_fl.learn.random.seeded`).
    """

    def __init__(self, name: str, build: Callable[[], nn.Module], seed: int) -> None:
        self.name, self.build, self._seed = name, build, seed
        module = self._fresh()
        shared = {id(t): t for t in (*module.parameters(), *module.buffers())}
        self._inference = respect_padding(copy.deepcopy(module, shared).eval())
        self._training = respect_padding(module.train())
        self._slots = {id(m): _slots(m) for m in (self._training, self._inference)}
        self.norm, self.norm_statistics = _norm_names(module)
        self.chain = layers_of(module)
        self.layers = _layers(module)
        self._known: list[tuple[Tensor, list[Tensor], Tensor]] | None = None
        self.draws = may_draw(module)

    def init(self, salt: str = "") -> Params:
        """Initial parameters and buffers, determined by seed and `salt` (a client's id where clients start differently)."""
        return _params(self._fresh(salt) if salt else self._training)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Run with training behaviour; BatchNorm statistics inside `params` are updated in place."""
        return self._run(self._training, params, x)

    def frozen(self, params: Params, x: Tensor) -> Tensor:
        """Run with inference behaviour; gradients still reach x, and params that require them."""
        if self._known is None:
            return self._run(self._inference, params, x)
        given = [params[name] for name in sorted(params)]
        for known_x, tensors, y in self._known:
            if known_x is x and len(given) == len(tensors) and all(map(operator.is_, given, tensors)):
                return y
        y = self._run(self._inference, params, x)
        self._known.append((x, given, y))
        return y

    @contextmanager
    def reused(self) -> Iterator[None]:
        """In this block `frozen` is computed once for the same x and the same tensors, none of which may change in it."""
        self._known = []
        try:
            yield
        finally:
            self._known = None

    def to(self, device: torch.device | str) -> "Part":
        """Move normalisation constants to a device; returns itself."""
        self._training.to(device)
        self._inference.to(device)
        return self

    def _run(self, module: nn.Module, params: Params, x: Tensor) -> Tensor:
        """As `torch.func.functional_call`, with names resolved in advance: a small head takes a sixth of the time."""
        slots = self._slots[id(module)]
        kept = [(place, key, place[key]) for name in params for place, key in slots[name]]
        try:
            for name, tensor in params.items():
                for place, key in slots[name]:
                    place[key] = tensor
            if (dtype := precision.current()) is None:
                return module(x)  # type: ignore[no-any-return]
            with torch.autocast(x.device.type, dtype):
                return module(x).float()  # type: ignore[no-any-return]
        finally:
            for place, key, tensor in kept:
                place[key] = tensor

    def _fresh(self, salt: str = "") -> nn.Module:
        with seeded(seed_for(self._seed, f"init.{self.name}", client=salt)):
            module = self.build()
        return module.requires_grad_(False)


@dataclass(frozen=True)
class Net:
    """A network for images of `input` and `classes` classes: its parts by name, also as attributes (`net.extractor`).

    `added` names the parts that a method declared.
    """

    input: InputSpec
    classes: int
    feature_dim: int
    seed: int
    parts: Mapping[str, Part] = field(default_factory=dict)
    added: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Part:
        try:
            return self.__dict__["parts"][name]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(f"net has no part {name!r}") from None

    def with_part(self, name: str, build: Callable[[], nn.Module], like: str = "") -> "Net":
        """The net with one more part; `like` names the part whose initial values it shares."""
        return replace(self, parts={**self.parts, name: Part(like or name, build, self.seed)})

    def with_projector(self) -> "Net":
        """The net with `projector` behind its extractor, drawn after it from the same seed."""
        build = self.parts["extractor"].build
        return self.with_part("extractor", lambda: nn.Sequential(build(), projector(self)))

    def with_added(self, name: str, spec: "PartSpec", method: object) -> "Net":
        """The net with a part declared by `method`; an already added part stays."""
        if name in self.added or not (spec.build or spec.like):
            return self
        if spec.build:
            net = self.with_part(name, partial(spec.build, self, method), spec.like)
        else:
            net = replace(self, parts={**self.parts, name: self.parts[spec.like]})
        return replace(net, added=self.added | {name})

    def top(self, layers: int) -> dict[str, frozenset[str]]:
        """The tensors of the last `layers` layers by part: the head's, then the extractor's from its end; at most all."""
        named = [(part, names) for part in ("extractor", "head") for names in self.parts[part].layers]
        top: dict[str, frozenset[str]] = {}
        for part, names in named[max(len(named) - layers, 0) :]:
            top[part] = top.get(part, frozenset()) | names
        return top

    def zeros(self) -> dict[str, Params]:
        """Extractor and head with 0 in place of every parameter, and without buffers: the start of sums over gradients or changes."""
        model = {name: parameters(self.parts[name].init()) for name in ("extractor", "head")}
        return {
            name: {key: torch.zeros_like(t) for (key,), t in held.items()} for name, held in model.items()
        }

    def to(self, device: torch.device | str) -> "Net":
        """Move the parts' constants to a device; returns itself."""
        for part in self.parts.values():
            part.to(device)
        return self


@dataclass(frozen=True)
class PartSpec:
    """A method's declaration of a part: `travels` if it is shared, and its network if it is not the net's extractor or head.

    build: (net, method) -> module, also in place of the net's part of that name; None for the net's parts and for statistics.
    like: the part of the same shape whose initial values it shares (docs/methods.md G11); without `build` also the network to copy.
    start: initial values of a part without a network.
    salted: initial values differ between clients.
    """

    travels: bool
    build: Callable[..., nn.Module] | None = None
    like: str = ""
    start: Mapping[str, float] = field(default_factory=dict)
    salted: bool = False


def shared(build: Callable[..., nn.Module] | None = None, like: str = "") -> PartSpec:
    """A part that server and clients exchange."""
    return PartSpec(True, build, like)


def personal(
    build: Callable[..., nn.Module] | None = None, like: str = "", *, salted: bool = False
) -> PartSpec:
    """A part that never leaves its client."""
    return PartSpec(False, build, like, salted=salted)


def history(**start: float) -> PartSpec:
    """Numbers that a client keeps between participations, with their initial values."""
    return PartSpec(False, start=start)


def linear_head(net: Net, method: object = None) -> nn.Module:
    """A head of the net's size: features [N, d] -> logits [N, C]."""
    return nn.Linear(net.feature_dim, net.classes)


def projector(net: Net, method: object = None) -> nn.Module:
    """DualFed's, on features [N, d] -> [N, d]: Linear to d/2, ReLU, BatchNorm, Linear back to d, BatchNorm."""
    dim, half = net.feature_dim, max(net.feature_dim // 2, 1)
    first = [nn.Linear(dim, half), nn.ReLU(), nn.BatchNorm1d(half)]
    return nn.Sequential(*first, nn.Linear(half, dim), nn.BatchNorm1d(dim))


def projection(net: Net, width: int) -> nn.Module:
    """Two layers on features, [N, d] -> [N, width]; the identity for width 0."""
    if not width:
        return nn.Identity()
    return nn.Sequential(
        nn.Linear(net.feature_dim, net.feature_dim), nn.ReLU(), nn.Linear(net.feature_dim, width)
    )


def _params(module: nn.Module) -> Params:
    parameters = {name: t.detach().clone() for name, t in module.named_parameters()}
    persistent = module.state_dict().keys()
    buffers = {BUFFER + name: t.detach().clone() for name, t in module.named_buffers() if name in persistent}
    return parameters | buffers


def _slots(module: nn.Module) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """The places of each tensor of `_params` in the module: (dict, key), more than one where layers share it."""
    names = {id(t): name for name, t in module.named_parameters()}
    names |= {id(t): BUFFER + name for name, t in module.named_buffers()}
    slots: dict[str, list[tuple[dict[str, Any], str]]] = {name: [] for name in names.values()}
    for child in module.modules():
        for place in (child._parameters, child._buffers):
            for key, tensor in place.items():
                if tensor is not None:
                    slots[names[id(tensor)]].append((place, key))
    return slots


def _layers(module: nn.Module) -> tuple[frozenset[str], ...]:
    kept = _params(module).keys()
    layers: list[frozenset[str]] = []
    for path, child in module.named_modules():
        tensors = (*child.named_parameters(recurse=False), *child.named_buffers(recurse=False))
        prefix = f"{path}." if path else ""
        names = frozenset(kept & {start + prefix + name for name, _ in tensors for start in ("", BUFFER)})
        if layers and isinstance(child, nn.modules.batchnorm._BatchNorm):
            layers[-1] |= names
        elif names:
            layers.append(names)
    return tuple(layers)


def _norm_names(module: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """BatchNorm tensors, found by module type and not by name (docs/methods.md G6)."""
    everything, statistics = set(), set()
    for path, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            prefix = f"{path}." if path else ""
            everything |= {prefix + name for name, _ in child.named_parameters(recurse=False)}
            statistics |= {BUFFER + prefix + name for name, _ in child.named_buffers(recurse=False)}
    kept = _params(module).keys()
    return frozenset(kept & (everything | statistics)), frozenset(kept & statistics)
