"""Parts and nets: a network is cut into named parts, each a pure function of its parameters.

A `Part` holds no weights that training could change: `init` gives fresh ones, `part(params, x)` runs with training behaviour (BatchNorm
uses the batch and moves the buffers inside `params`), `part.frozen(params, x)` with inference behaviour. What is frozen is said
by the call, not by a flag. A part is for one thread at a time (torch swaps the parameters in during a call).
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from edge_fl.config import InputSpec
from edge_fl.learn.network import precision
from edge_fl.learn.network.chain import links
from edge_fl.learn.network.masked_norm import respect_padding
from edge_fl.learn.tree import BUFFER, Params
from edge_fl.seeds import seed_for

_building = threading.Lock()


@contextmanager
def building(seed: int = 0) -> Iterator[None]:
    """Modules are built in here, one at a time: torch draws their initial values from one generator that all threads share."""
    with _building, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class Part:
    """One named part of a network; `norm` names every BatchNorm tensor in it, `norm_statistics` only the running ones.

    `chain` lists its layers if it is a plain chain of them, and is None otherwise.

    `layers` holds the names of each layer's tensors, first layer first; a BatchNorm belongs to the layer before it.
    """

    def __init__(self, name: str, build: Callable[[], nn.Module], seed: int) -> None:
        self.name, self.build, self._seed = name, build, seed
        module = self._fresh()
        shared = {id(t): t for t in (*module.parameters(), *module.buffers())}
        self._inference = respect_padding(copy.deepcopy(module, shared).eval())
        self._training = respect_padding(module.train())
        self._slots = {id(m): _slots(m) for m in (self._training, self._inference)}
        self.norm, self.norm_statistics = _norm_names(module)
        self.chain = links(module)
        self.layers = _layers(module)

    def init(self, salt: str = "") -> Params:
        """Fresh parameters and buffers; the same for the same salt (a client's id where clients differ from the start)."""
        return _params(self._fresh(salt) if salt else self._training)

    def __call__(self, params: Params, x: Tensor) -> Tensor:
        """Training behaviour; BatchNorm statistics inside `params` move in place."""
        return self._run(self._training, params, x)

    def frozen(self, params: Params, x: Tensor) -> Tensor:
        """Inference behaviour; gradients still flow through to x, and to params if they ask for them."""
        return self._run(self._inference, params, x)

    def to(self, device: torch.device | str) -> Part:
        """Moves what is not a parameter (normalisation constants) to a device; returns itself."""
        self._training.to(device)
        self._inference.to(device)
        return self

    def _run(self, module: nn.Module, params: Params, x: Tensor) -> Tensor:
        """`torch.func.functional_call`, with its search for names done once and for all: a small head takes a sixth of the time."""
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
        with building(seed_for(self._seed, f"init.{self.name}", client=salt)):
            module = self.build()
        return module.requires_grad_(False)


@dataclass(frozen=True)
class Net:
    """A network for images of `input` and `classes` classes: its parts by name, also as attributes (`net.extractor`).

    `added` names the parts that a method has brought along.
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

    def with_part(self, name: str, build: Callable[[], nn.Module], like: str = "") -> Net:
        """The net and one more part; `like` names the part whose initial values it shares (same shapes, same start)."""
        return replace(self, parts={**self.parts, name: Part(like or name, build, self.seed)})

    def with_added(self, name: str, spec: PartSpec, method: object) -> Net:
        """The net and a part as `method` declares it; one that it has brought along already stays."""
        if name in self.added or not (spec.build or spec.like):
            return self
        if spec.build:
            net = self.with_part(name, partial(spec.build, self, method), spec.like)
        else:
            net = replace(self, parts={**self.parts, name: self.parts[spec.like]})
        return replace(net, added=self.added | {name})

    def top(self, layers: int) -> dict[str, frozenset[str]]:
        """The tensors of the last `layers` layers by part: the head's, then the extractor's from its end; all when there are fewer."""
        named = [(part, names) for part in ("extractor", "head") for names in self.parts[part].layers]
        found: dict[str, frozenset[str]] = {}
        for part, names in named[max(len(named) - layers, 0) :]:
            found[part] = found.get(part, frozenset()) | names
        return found

    def to(self, device: torch.device | str) -> Net:
        """Moves the parts' constants to a device; returns itself."""
        for part in self.parts.values():
            part.to(device)
        return self


@dataclass(frozen=True)
class PartSpec:
    """How a method declares a part: may it travel, and the network it needs beyond extractor and head.

    `build(net, method)` gives the module, in place of the net's own of that name if there is one; None for the net's own parts and for
    statistics such as prototypes. `like` names the part of the same shape whose initial values it shares (METHODS.md G11); `like`
    without `build` is that very network with parameters of its own. `start` holds the numbers that a part without a network starts from,
    `state_of` names the parts whose optimiser it keeps. What is `salted` starts from other values on every client.
    """

    travels: bool
    build: Callable[..., nn.Module] | None = None
    like: str = ""
    start: Mapping[str, float] = field(default_factory=dict)
    state_of: tuple[str, ...] = ()
    salted: bool = False


def shared(build: Callable[..., nn.Module] | None = None, like: str = "") -> PartSpec:
    """A part that may travel between server and clients."""
    return PartSpec(True, build, like)


def personal(
    build: Callable[..., nn.Module] | None = None, like: str = "", *, salted: bool = False
) -> PartSpec:
    """A part that never leaves its client."""
    return PartSpec(False, build, like, salted=salted)


def history(**start: float) -> PartSpec:
    """Numbers that a client remembers from one participation to the next, and what they are before its first."""
    return PartSpec(False, start=start)


def optimiser_state(*parts: str) -> PartSpec:
    """The state of an optimiser that trains `parts`, kept from round to round (the exception to METHODS.md G8)."""
    return PartSpec(False, state_of=parts)


def linear_head(net: Net, method: object = None) -> nn.Module:
    """A head of the net's size: features [N, d] -> logits [N, C]."""
    return nn.Linear(net.feature_dim, net.classes)


def alignment(net: Net, method: object = None) -> nn.Module:
    """Features [N, d] of one network -> [N, d] as another has them (W_h of FedKD)."""
    return nn.Linear(net.feature_dim, net.feature_dim, bias=False)


def projection(net: Net, width: int) -> nn.Module:
    """Two layers on features, [N, d] -> [N, width]; nothing at all for width 0."""
    if not width:
        return nn.Identity()
    return nn.Sequential(
        nn.Linear(net.feature_dim, net.feature_dim), nn.ReLU(), nn.Linear(net.feature_dim, width)
    )


def projector(net: Net, method: object = None) -> nn.Module:
    """Features [N, d] -> [N, d]: Linear to d/2, ReLU, BatchNorm, Linear back to d, BatchNorm (DualFed)."""
    dim, half = net.feature_dim, max(net.feature_dim // 2, 1)
    inwards = [nn.Linear(dim, half), nn.ReLU(), nn.BatchNorm1d(half)]
    return nn.Sequential(*inwards, nn.Linear(half, dim), nn.BatchNorm1d(dim))


def _params(module: nn.Module) -> Params:
    parameters = {name: t.detach().clone() for name, t in module.named_parameters()}
    persistent = module.state_dict().keys()
    buffers = {BUFFER + name: t.detach().clone() for name, t in module.named_buffers() if name in persistent}
    return parameters | buffers


def _slots(module: nn.Module) -> dict[str, list[tuple[dict[str, Any], str]]]:
    """Where each tensor of `_params` stands in the module: (dict, key), more than once where layers share it."""
    names = {id(t): name for name, t in module.named_parameters()}
    names |= {id(t): BUFFER + name for name, t in module.named_buffers()}
    found: dict[str, list[tuple[dict[str, Any], str]]] = {name: [] for name in names.values()}
    for child in module.modules():
        for place in (child._parameters, child._buffers):
            for key, tensor in place.items():
                if tensor is not None:
                    found[names[id(tensor)]].append((place, key))
    return found


def _layers(module: nn.Module) -> tuple[frozenset[str], ...]:
    kept = _params(module).keys()
    found: list[frozenset[str]] = []
    for path, child in module.named_modules():
        tensors = (*child.named_parameters(recurse=False), *child.named_buffers(recurse=False))
        prefix = f"{path}." if path else ""
        names = frozenset(kept & {start + prefix + name for name, _ in tensors for start in ("", BUFFER)})
        if found and isinstance(child, nn.modules.batchnorm._BatchNorm):
            found[-1] |= names
        elif names:
            found.append(names)
    return tuple(found)


def _norm_names(module: nn.Module) -> tuple[frozenset[str], frozenset[str]]:
    """BatchNorm found by module type (METHODS.md G6), never by name."""
    everything, statistics = set(), set()
    for path, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            prefix = f"{path}." if path else ""
            everything |= {prefix + name for name, _ in child.named_parameters(recurse=False)}
            statistics |= {BUFFER + prefix + name for name, _ in child.named_buffers(recurse=False)}
    return frozenset(everything | statistics), frozenset(statistics)
