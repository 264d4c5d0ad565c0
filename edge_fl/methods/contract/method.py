"""The contract of a method: it declares its parts and defines, in pure functions, the steps of client and server.

The same object runs in a plain loop, vectorised over clients, and on a device. How each kind of method fits:

- **one shared model** (FedAvg, FedProx, MOON, FedNTD): all parts are shared; `local_update` is one `fit`.
- **split models** (FedPer, FedRep, FedCRC, LG-FedAvg): some parts are personal. Two stages are two `fit` calls; a part that a stage must
  not change is not among the arguments of its `fit`.
- **extra personal networks** (Ditto's model, DualFed's projector, FedRIR's decoder, FedKD's teacher, FedCP's policy): parts declared
  with a builder, `personal(build)`; every client has them from the start (`init_own`), sampled or not.
- **statistics** (prototypes of FedProto, FedCRL, FedPAC; SphereFed's sums): parts like any other, a dict of tensors, combined in
  `aggregate`.
- **control variates** (SCAFFOLD): shared parts `like` the network, which start from 0 and are sent as received plus change.
- **memory of a client's past** (FedDyn, MOON): personal parts; what the server sums up of it is server memory.
- **server-side training** (FedGH's head) and **optimisation** (FedPAC's combination): inside `aggregate`, which is pure too; server memory
  is a shared part that `broadcast` does not send.
- **per-client broadcast** (FedAMP, FedPAC): `broadcast(shared, client)` selects what this client receives.
- **final personalisation** (fine-tuning, RepPer's heads, SphereFed's calibration): `personalise` on the clients, then `finalise` on the
  server.
- **custom inner loops** (pFedMe, Per-FedAvg, FedALA, FedRIR): a pure step passed to `learn.fit.scan`.
- **schedules** (learning rate, FedKD's threshold): `at(round)` returns the method with that round's settings.

BatchNorm policy, checks and update codec are applied by `methods.contract.steps`, through which engines call a method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from edge_fl.config import CompressionConfig, OptimiserConfig, Option, PrivacyConfig
from edge_fl.errors import MethodError, brief, nearest
from edge_fl.heads.plan import HeadUpdateKind, Way
from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import PROTOTYPES, Update, no_prototypes, only_owned, weighted_mean
from edge_fl.learn.batches import Batches
from edge_fl.learn.fit import Loss, P, fit
from edge_fl.learn.network.part import Net, PartSpec, personal, shared
from edge_fl.learn.objective import CrossEntropy
from edge_fl.learn.optimiser import Optimiser, Sgd
from edge_fl.learn.tree import Params, Parts

Numbers = Mapping[str, str | float]  # setting of a head plan -> value, or the hyper-parameter that holds it
PERSONAL = "personal_"  # prefix of a part's name: the client's own version of a part that it also receives
TUNED = "tuned_"  # prefix: the version after fine-tuning in final personalisation
SHARED_MODEL = {name: shared() for name in ("extractor", "head")}
PERSONAL_MODEL = {f"{PERSONAL}{name}": personal(like=name) for name in ("extractor", "head")}


@dataclass(frozen=True)
class Hyper:
    """Description, allowed values (closed range [low, high], or `choices`) and source of a hyper-parameter."""

    doc: str
    low: float | None = None
    high: float | None = None
    choices: tuple[Any, ...] = ()
    source: str = ""


def hyper(default: Any, doc: str, **limits: Any) -> Any:
    """A dataclass field with a `Hyper`; keywords: low, high, choices, source ("[P]" paper, "[C]" code, "[D]" our decision)."""
    return dataclasses.field(default=default, metadata={"hyper": Hyper(doc, **limits)})


def hypers_of(method: type) -> dict[str, tuple[Any, Hyper]]:
    """Default and `Hyper` of every hyper-parameter of a method, by name."""
    return {
        f.name: (f.default, f.metadata["hyper"]) for f in dataclasses.fields(method) if "hyper" in f.metadata
    }


def check_hypers(method: str, values: dict[str, Any], known: dict[str, tuple[Any, Hyper]]) -> None:
    """Raises MethodError for an unknown name, a wrong type or a value out of range."""
    for name, value in values.items():
        if name not in known:
            raise MethodError(f"method {method}: unknown hyper-parameter {name!r}{nearest(name, known)}")
        default, limits = known[name]
        if wrong := _wrong(value, default, limits):
            raise MethodError(f"method {method}: {name} = {value!r}, expected {wrong}")


def _wrong(value: Any, default: Any, limits: Hyper) -> str:
    if limits.choices and value not in limits.choices:
        return "one of " + ", ".join(map(repr, limits.choices))
    if isinstance(default, bool) != isinstance(value, bool) and not limits.choices:
        return "true or false" if isinstance(default, bool) else type(default).__name__
    if isinstance(default, int | float) and not isinstance(value, int | float):
        return "a number"
    if isinstance(default, int) and not isinstance(value, int):
        return "a whole number"
    if isinstance(value, Sequence) or value is None:
        return ""
    below = limits.low is not None and not value >= limits.low
    above = limits.high is not None and not value <= limits.high
    if below or above:
        return f"{'-inf' if limits.low is None else limits.low} to {'inf' if limits.high is None else limits.high}"
    return ""


class BatchNorm(Enum):
    """BatchNorm of shared parts (docs/methods.md G6): all shared; running statistics local; all of its tensors local."""

    SYNC = "sync"
    LOCAL_STATS = "local_stats"
    LOCAL_BN = "local_bn"


def require_method(found: Any, name: str) -> None:
    """Raise MethodError for what is not a method: a frozen dataclass, a subclass of `Method`, with what a method declares."""
    if not (isinstance(found, type) and issubclass(found, Method)):
        what = f"a class ({found.__name__})" if isinstance(found, type) else type(found).__name__
        raise MethodError(
            f"method {name!r}: {what}, expected a subclass of edge_fl.methods.contract.method.Method"
        )
    if any(
        isinstance(value, dataclasses.Field) for value in vars(found).values()
    ):  # the decorator replaces these
        raise MethodError(
            f"method {name!r}: no dataclass, expected @dataclass(frozen=True) above class {found.__name__}"
        )
    missing = [key for key in ("title", "citation", "family", "parts") if not hasattr(found, key)]
    if missing:
        raise MethodError(
            f"method {name!r}: class {found.__name__} has no {', '.join(missing)}; expected them as in docs/your-own.md"
        )
    if not (
        isinstance(found.parts, Mapping) and all(isinstance(spec, PartSpec) for spec in found.parts.values())
    ):
        raise MethodError(
            f"method {name!r}: parts = {brief(found.parts)}, expected a dict of a part's name -> shared(...) or personal(...)"
        )


@dataclass(frozen=True)
class HeadTier:
    """Training on head-only devices (docs/methods-on-devices.md, "Device tiers").

    kind: "native" (a stage of the method itself), "adapted" (a documented reduction) or "none" (not supported: no shared extractor).
    trains: what the device trains, in words.
    extras: shared parts of a release in addition to the extractor; start: the extra that is a linear head to start from.
    updates: head updates that a device may send: part -> how it is computed (`edge_fl.heads.head_updates`). They join the next `aggregate`,
    or with `final` the method's `finalise`.
    way: how the linear head is found (`edge_fl.heads.WAYS`); numbers: settings of the head plan.
    """

    kind: str = "adapted"
    trains: str = "head"
    extras: tuple[str, ...] = ()
    updates: Mapping[str, HeadUpdateKind] = field(default_factory=dict)
    start: str = "head"
    way: Way = "own"
    numbers: Numbers = field(default_factory=dict)
    final: bool = False


@dataclass(frozen=True)
class Method:
    """A method on a net. Fields made with `hyper(...)` are its hyper-parameters; they are checked when the method is built.

    `compression` and `privacy` are for the update codec; methods do not use them. `augmentation` is for the clients' batches, `norm_policy`
    replaces the method's `batch_norm`. `total_rounds` are those of the run (0: unknown); after
    every `evaluate_every`-th local update a client evaluates its own model (0: never).
    """

    net: Net = field(repr=False)
    epochs: int = 1
    optimiser: Optimiser = Sgd(0.05)
    compression: CompressionConfig = field(default=CompressionConfig(), kw_only=True)
    privacy: PrivacyConfig = field(default=PrivacyConfig(), kw_only=True)
    augmentation: str = field(default="none", kw_only=True)
    norm_policy: str = field(default="", kw_only=True)
    total_rounds: int = field(default=0, kw_only=True)
    evaluate_every: int = field(default=0, kw_only=True)

    title: ClassVar[str]
    citation: ClassVar[str]
    family: ClassVar[str]
    parts: ClassVar[Mapping[str, PartSpec]]
    # shared parts in the ONNX extractor; () = nothing to export
    exports: ClassVar[tuple[str, ...]] = ("extractor",)
    batch_norm: ClassVar[BatchNorm] = BatchNorm.SYNC
    uniform: ClassVar[bool] = False  # equal weights for clients instead of weights by samples
    unit_norm: ClassVar[bool] = False  # features have length 1
    head_tier: ClassVar[HeadTier] = HeadTier()
    has_global: ClassVar[bool] = False  # `predict_global` gives logits
    predicts_early: ClassVar[bool] = True  # a client can predict before `personalise`
    sends: ClassVar[tuple[str, ...]] = ()  # shared parts that clients send; () = all
    receives: ClassVar[tuple[str, ...]] = ()  # shared parts that clients receive; () = all
    fixed_head: ClassVar[bool] = False  # server and clients draw the head from the seed, so it is not sent
    trains_everyone: ClassVar[bool] = False  # all clients train together, as often as one is drawn on average
    # (part, scalar): the weight that a client states in its update
    stated_weight: ClassVar[tuple[str, str] | None] = None
    vectorises: ClassVar[bool] = True  # `local_update` runs under torch.func.vmap
    measures: ClassVar[tuple[str, ...]] = ()  # names of the metrics that `measure` may return
    usual_optimiser: ClassVar[OptimiserConfig | None] = None  # the paper's; used when a recipe names none
    # values that `compare --tune` tries, of at most two hyper-parameters
    grid: ClassVar[Mapping[str, tuple[Option, ...]]] = {}
    deviations: ClassVar[str] = ""  # from the paper, for `methods show`

    def __post_init__(self) -> None:
        """Add the method's own parts to the net and check the hyper-parameters. Raises MethodError."""
        known = hypers_of(type(self))
        check_hypers(self.title, {name: getattr(self, name) for name in known}, known)
        if self.epochs < 0:
            raise MethodError(f"method {self.title}: epochs = {self.epochs}, expected 0 or more")
        if self.norm_policy:
            object.__setattr__(self, "batch_norm", BatchNorm(self.norm_policy))
        net = self.net
        for name, spec in self.parts.items():
            net = net.with_added(name, spec, self)
        object.__setattr__(self, "net", net)

    # initial parts of server and clients

    def init_shared(self) -> Parts:
        """Initial shared parts, with all prototypes absent; override to add other statistics."""
        start = {name: self.net.parts[name].init() for name in self.travelling() if name in self.net.parts}
        if PROTOTYPES in self.travelling():
            start[PROTOTYPES] = no_prototypes(self.net.classes, self.net.feature_dim)
        return start

    def init_own(self, client: str) -> Parts:
        """Initial personal parts of a client: equal on all clients except parts declared `salted` (docs/methods.md G11)."""
        own: Parts = {}
        for name, spec in self.parts.items():
            if spec.travels:
                continue
            if name in self.net.parts:
                own[name] = self.net.parts[name].init(client if spec.salted else "")
            elif spec.start:
                own[name] = {key: torch.tensor(value) for key, value in spec.start.items()}
        return own

    # one round

    def at(self, round: int) -> Self:
        """The method with the settings of a round (1-based)."""
        return replace(self, optimiser=self.optimiser.at(round))

    def broadcast(self, shared: Parts, client: str) -> Parts:
        """The parts that one client receives: by default those in `receives`; a fixed head only after it changed."""
        sent = (name for name in self.receives or self.travelling() if name in shared)
        return {name: shared[name] for name in sent if not self._drawn(name, shared[name])}

    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        """One client's training in a round -> (up, own). Pure: arguments are not changed, randomness comes from `data`.

        By default the received extractor and head are trained with cross-entropy.
        """
        return self.train(self.loss, down, data), own

    def before_training(self, down: Parts, own: Parts) -> Parts:
        """The personal parts with which a client that never trained predicts; by default `own` as drawn (docs/methods.md G16)."""
        return own

    def after_training(self, down: Parts, up: Parts) -> Parts:
        """The received parts as this client's own update left them, for the evaluation before aggregation; `up` over `down`."""
        return tree.merge(down, up)

    def pack(self, up: Parts) -> Parts:
        """An update for transport: prototypes without absent classes. Runs outside vmap, so shapes may depend on values."""
        return {name: only_owned(params) if name == PROTOTYPES else params for name, params in up.items()}

    def unpack(self, down: Parts, sent: Parts) -> Parts:
        """Packed parts of a client that received `down`, as tensors whose sizes can be compared between clients."""
        return sent

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        """Combine unpacked updates, an iterable in ascending client id, into new shared parts."""
        return weighted_mean(shared, updates, uniform=self.uniform)

    # once, after the last round

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        """A client's final personalisation -> (up, own); by default nothing."""
        return {}, own

    def finalise(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        """Complete the shared parts from the updates of `personalise`; by default nothing."""
        return shared

    # prediction

    def features(self, parts: Parts, x: Tensor) -> Tensor:
        """Features of the exported extractor: pixels [N, C, H, W] -> [N, d], inference behaviour."""
        return self.net.extractor.frozen(parts["extractor"], x)

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """Personalised logits [N, C] from the client's received and personal parts.

        By default `classify`, with the client's own version of a received part in its place: tuned, else personal, the latter only if it
        has "trained", where its history tells.
        """
        own = tree.unprefixed(PERSONAL, parts)
        if (history := parts.get("history", {})).keys() >= {"trained"}:
            own = tree.where(history["trained"], own, {name: parts[name] for name in own})
        return self.classify({**parts, **own, **tree.unprefixed(TUNED, parts)}, x)

    def predict_global(self, shared: Parts, x: Tensor) -> Tensor | None:
        """Logits [N, C] of the global model, or None if the method has none."""
        head = "global_head" if "global_head" in shared else "head"
        return self.classify(shared, x, head) if self.has_global else None

    def measure(self, parts: Parts, data: Batches) -> dict[str, Tensor]:
        """The method's own numbers from all parts of a client and its training data; by default none.

        Only names in `measures` may leave a device. They begin with the method's name ("fedcrl.tau_mix"), which distinguishes them from
        accuracies.
        """
        return {}

    # derived from the declarations

    def travelling(self) -> tuple[str, ...]:
        """Names of the shared parts."""
        return tuple(name for name, spec in self.parts.items() if spec.travels)

    def sent(self) -> tuple[str, ...]:
        """Names of the parts that a client may send."""
        return self.sends or self.travelling()

    def averages(self) -> bool:
        """Whether late updates can join (FedBuff): clients send only networks, and all clients received the same ones."""
        sent, alike = self.sent(), type(self).broadcast is Method.broadcast
        return (
            bool(sent) and alike and not self.trains_everyone and all(name in self.net.parts for name in sent)
        )

    @property
    def draws(self) -> bool:
        """Whether a step may draw from torch's global generators: a network may (`Part.draws`), or it is a user's own method."""
        own = type(self).__module__.partition(".")[0] != "edge_fl"
        return own or any(part.draws for part in self.net.parts.values())

    def head_updates(self) -> Mapping[str, HeadUpdateKind]:
        """Head updates that head-only devices may send; none under privacy, because only full devices add noise."""
        return {} if self.privacy.noise_multiplier else self.head_tier.updates

    def _drawn(self, name: str, params: Params) -> bool:
        """Whether a part is the fixed head as drawn from the seed."""
        return self.fixed_head and name == "head" and tree.same(params, self.net.head.init())

    # building blocks of the methods

    @property
    def loss(self) -> CrossEntropy:
        """Cross-entropy of head(extractor(x)); params are Parts with both."""
        return CrossEntropy({"extractor": self.net.extractor, "head": self.net.head})

    @property
    def head_loss(self) -> CrossEntropy:
        """Cross-entropy of head(z) on features z; params are the head's."""
        return CrossEntropy({"head": self.net.head})

    def train(
        self, loss: Loss, params: P, data: Batches, *, stage: str = "train", epochs: int | None = None
    ) -> P:
        """Train `params` with the method's optimiser, for its `epochs` by default."""
        epochs = self.epochs if epochs is None else epochs
        return fit(loss, params, data, stage=stage, epochs=epochs, optimiser=self.optimiser)

    def fit_extractor(
        self, extractor: Params, head: Params, data: Batches, *, stage: str, name: str = "head"
    ) -> Params:
        """Train an extractor under a frozen head (the net's part `name`) with cross-entropy for `self.epochs`."""
        loss = CrossEntropy(
            {"extractor": self.net.extractor, name: self.net.parts[name]}, frozen={name: head}
        )
        return self.train(loss, extractor, data, stage=stage)

    def classify(self, parts: Mapping[str, Params], x: Tensor, head: str = "head") -> Tensor:
        """Logits [N, C] of a head on `features`; a fixed head that is not among the parts is drawn from the seed."""
        part = self.net.parts[head]
        params = part.init() if self.fixed_head and head not in parts else parts[head]
        return part.frozen(params, self.features(dict(parts), x))
