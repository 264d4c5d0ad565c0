"""The contract of a method: it declares its parts and says, in pure functions, what a client and the server do.

The same object runs in a plain loop, vectorised over clients, and on a device. How each kind of method fits:

- **one shared model** (FedAvg, FedProx, MOON): all parts are shared; `local_update` is one `fit`.
- **split models** (FedPer, FedRep, FedCRC, LG-FedAvg): some parts are personal; two stages are two `fit` calls, and what a stage
  must not change is not among the arguments of its `fit`.
- **extra personal networks** (Ditto's model, DualFed's projector, FedRIR's decoder, FedKD's teacher, FedCP's policy): parts declared
  with a builder, `personal(build)`; they exist on every client from the start (`init_own`), sampled or not.
- **statistics that travel** (prototypes of FedProto, FedCRL, FedPAC; SphereFed's sums): parts like any other, a dict of tensors;
  `aggregate` says how they are joined.
- **server-side training** (FedGH's head) and **server-side optimisation** (FedPAC's combination): inside `aggregate`, which is pure
  too: server memory is a shared part that `broadcast` does not send.
- **per-client broadcast** (FedAMP, FedPAC): `broadcast(shared, client)` picks what this client gets.
- **closing steps** (fine-tuning, RepPer's heads, SphereFed's calibration): `personalise` on the clients, then `finalise` on the server.
- **unusual inner loops** (pFedMe, Per-FedAvg, Fed-RoD, FedALA, FedRIR): a pure step given to `learn.fit.scan`.
- **schedules** (learning rate, FedKD's threshold): `at(round)` returns the method as it is in that round.

BatchNorm policy, checks and bookkeeping are not a method's business: engines call methods through `methods.steps`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from edge_fl.config import CompressionConfig, OptimiserConfig, PrivacyConfig
from edge_fl.errors import MethodError
from edge_fl.heads.plan import Share, Way
from edge_fl.learn import tree
from edge_fl.learn.aggregation.mean import PROTOTYPES, Update, no_prototypes, only_owned, weighted_mean
from edge_fl.learn.batches import Batches
from edge_fl.learn.fit import fit
from edge_fl.learn.network.part import Net, PartSpec, personal, shared
from edge_fl.learn.objective import CrossEntropy
from edge_fl.learn.optimiser import Optimiser, Sgd
from edge_fl.learn.tree import Params, Parts
from edge_fl.methods.contract import hyper

Uploads = Mapping[str, Share]  # by part: how a head-only device finds it
Numbers = Mapping[str, str | float]  # by name: as they are, or the hyper-parameter that gives them
PERSONAL = "personal_"  # before a part's name: the client's own version of a part that it also receives
TUNED = "tuned_"  # the same, as the closing fine-tuning leaves it
SHARED_MODEL = {name: shared() for name in ("extractor", "head")}
PERSONAL_MODEL = {f"{PERSONAL}{name}": personal(like=name) for name in ("extractor", "head")}


class BatchNorm(Enum):
    """Who keeps BatchNorm of a shared part (METHODS.md G6): all shared; running statistics local; every tensor of it local."""

    SYNC = "sync"
    LOCAL_STATS = "local_stats"
    LOCAL_BN = "local_bn"


@dataclass(frozen=True)
class HeadTier:
    """What a head-only device does under a method (METHODS.md 6.2).

    kind: "native" (a stage of the method itself), "adapted" (a documented reduction) or "none" (no shared extractor: refused).
    `extras` names the shared parts that travel beside the extractor, `start` the one among them that is a linear head to start from;
    `uploads` the parts that a device may send back, and how it finds each (`edge_fl.heads.shares`). They join the next `aggregate`, or
    with `closes` the method's `finalise`. `way` is how the linear head is found (`edge_fl.heads.WAYS`), `numbers` the plan's numbers by
    the hyper-parameters that give them, or as they are.
    """

    kind: str = "adapted"
    trains: str = "head"
    extras: tuple[str, ...] = ()
    uploads: Uploads = field(default_factory=dict)
    start: str = "head"
    way: Way = "own"
    numbers: Numbers = field(default_factory=dict)
    closes: bool = False


@dataclass(frozen=True)
class Method(ABC):
    """A method on a net. Fields made with `hyper(...)` are its hyper-parameters; they are checked when the method is built.

    `compression` and `privacy` say how its updates travel, which is `methods.transit`'s business and no method's.
    """

    net: Net = field(repr=False)
    epochs: int = 1
    optimiser: Optimiser = Sgd(0.05)
    compression: CompressionConfig = field(default=CompressionConfig(), kw_only=True)
    privacy: PrivacyConfig = field(default=PrivacyConfig(), kw_only=True)

    title: ClassVar[str]
    citation: ClassVar[str]
    family: ClassVar[str]
    parts: ClassVar[Mapping[str, PartSpec]]
    # shared parts in the ONNX extractor; () = nothing to export
    exports: ClassVar[tuple[str, ...]] = ("extractor",)
    batch_norm: ClassVar[BatchNorm] = BatchNorm.SYNC
    uniform: ClassVar[bool] = False  # clients weigh the same instead of by samples
    unit_norm: ClassVar[bool] = False  # features have length 1
    head_tier: ClassVar[HeadTier] = HeadTier()
    has_global: ClassVar[bool] = False  # `predict_global` gives logits
    predicts_early: ClassVar[bool] = True  # a client can predict before `personalise`
    sends: ClassVar[tuple[str, ...]] = ()  # shared parts that clients send up; () = every one
    receives: ClassVar[tuple[str, ...]] = ()  # shared parts that go down to clients; () = every one
    fixed_head: ClassVar[bool] = False  # everybody draws it from the seed, so that it need not travel
    trains_everyone: ClassVar[bool] = False  # the cohort is always the whole fleet
    vectorises: ClassVar[bool] = True  # `local_update` runs under torch.func.vmap
    usual_optimiser: ClassVar[OptimiserConfig | None] = None  # the paper's, for whoever names only the method
    deviations: ClassVar[str] = ""  # from the paper, for `methods show`

    def __post_init__(self) -> None:
        """Completes the net by the method's own parts and checks the hyper-parameters. Raises MethodError."""
        known = hyper.hypers(type(self))
        hyper.check(self.title, {name: getattr(self, name) for name in known}, known)
        if self.epochs < 0:
            raise MethodError(f"method {self.title}: epochs = {self.epochs}, expected 0 or more")
        net = self.net
        for name, spec in self.parts.items():
            net = net.with_added(name, spec, self)
        object.__setattr__(self, "net", net)

    # what the server starts from, and what a client owns before it has ever taken part

    def init_shared(self) -> Parts:
        """Initial shared parts, prototypes all absent; override to add other statistics."""
        start = {name: self.net.parts[name].init() for name in self.travelling() if name in self.net.parts}
        if PROTOTYPES in self.travelling():
            start[PROTOTYPES] = no_prototypes(self.net.classes, self.net.feature_dim)
        return start

    def init_own(self, client: str) -> Parts:
        """Initial personal parts of a client: the same on all clients but for those declared `salted` (METHODS.md G11)."""
        own: Parts = {}
        for name, spec in self.parts.items():
            if spec.travels:
                continue
            if name in self.net.parts:
                own[name] = self.net.parts[name].init(client if spec.salted else "")
            elif spec.state_of:
                trained = tree.parameters({part: self.net.parts[part].init() for part in spec.state_of})
                own[name] = tree.flat(self.optimiser.init(trained))
            elif spec.start:
                own[name] = {key: torch.tensor(value) for key, value in spec.start.items()}
        return own

    # one round

    def at(self, round: int) -> Self:
        """The method as it is in a round (1-based)."""
        return replace(self, optimiser=self.optimiser.at(round))

    def broadcast(self, shared: Parts, client: str) -> Parts:
        """What one client receives: by default the shared parts that `receives` names, a fixed head only once it is another."""
        sent = (name for name in self.receives or self.travelling() if name in shared)
        return {name: shared[name] for name in sent if not self._drawn(name, shared[name])}

    @abstractmethod
    def local_update(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        """One client's round -> (up, own). Pure: arguments are not changed, randomness comes from `data`."""

    def pack(self, up: Parts) -> Parts:
        """An update as it travels: prototypes without absent classes. Runs outside vmap, so that shapes may depend on values."""
        return {name: only_owned(params) if name == PROTOTYPES else params for name, params in up.items()}

    def aggregate(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        """The server's step over packed updates in ascending client id, consumed once."""
        return weighted_mean(shared, updates, uniform=self.uniform)

    # once, after the last round

    def personalise(self, down: Parts, own: Parts, data: Batches) -> tuple[Parts, Parts]:
        """A client's closing step -> (up, own); by default nothing."""
        return {}, own

    def finalise(self, shared: Parts, updates: Iterable[Update]) -> Parts:
        """The server's closing step over what `personalise` sent up; by default nothing."""
        return shared

    # use

    def features(self, parts: Parts, x: Tensor) -> Tensor:
        """What the exported extractor computes: pixels [N, C, H, W] -> features [N, d], inference behaviour."""
        return self.net.extractor.frozen(parts["extractor"], x)

    def predict(self, parts: Parts, x: Tensor) -> Tensor:
        """Personalised logits [N, C] from the client's shared and personal parts together: by default the plain prediction."""
        return self.classify(parts, x)

    def predict_global(self, shared: Parts, x: Tensor) -> Tensor | None:
        """Logits [N, C] of the global model: the plain prediction by its head, or None for methods that have none."""
        head = "global_head" if "global_head" in shared else "head"
        return self.classify(shared, x, head) if self.has_global else None

    def measure(self, parts: Parts, data: Batches) -> dict[str, Tensor]:
        """The method's own numbers beside accuracies, from all parts of a client and its training data; by default none.

        Their names begin with the method's ("fedcrl.tau_mix"), so that nobody takes them for an accuracy.
        """
        return {}

    # what follows from the declarations

    def travelling(self) -> tuple[str, ...]:
        """Names of the shared parts."""
        return tuple(name for name, spec in self.parts.items() if spec.travels)

    def sent(self) -> tuple[str, ...]:
        """Names of the parts that a client may send."""
        return self.sends or self.travelling()

    def averages(self) -> bool:
        """Whether clients send networks that all of them were sent alike, so that a late change can be moved to newer ones (FedBuff)."""
        sent, alike = self.sent(), type(self).broadcast is Method.broadcast
        return (
            bool(sent) and alike and not self.trains_everyone and all(name in self.net.parts for name in sent)
        )

    def uploads(self) -> Uploads:
        """What head-only devices may send back; nothing under privacy, whose noise is put on the updates of full ones."""
        return {} if self.privacy.noise_multiplier else self.head_tier.uploads

    def _drawn(self, name: str, params: Params) -> bool:
        """Whether a part is the fixed head as everybody draws it."""
        return self.fixed_head and name == "head" and tree.same(params, self.net.head.init())

    # the plain pieces that a method's own steps are made of

    @property
    def loss(self) -> CrossEntropy:
        """The plain training loss: cross-entropy of head on extractor."""
        return CrossEntropy({"extractor": self.net.extractor, "head": self.net.head})

    @property
    def head_loss(self) -> CrossEntropy:
        """The plain training loss of the head on features."""
        return CrossEntropy({"head": self.net.head})

    def fit_head(self, head: Params, z: Batches, *, stage: str, epochs: int) -> Params:
        """A head of the net's size after cross-entropy on features of a frozen extractor."""
        return fit(self.head_loss, head, z, stage=stage, epochs=epochs, optimiser=self.optimiser)

    def fit_extractor(
        self, extractor: Params, head: Params, data: Batches, *, stage: str, name: str = "head"
    ) -> Params:
        """The extractor after `epochs` of cross-entropy under a frozen head."""
        loss = CrossEntropy(
            {"extractor": self.net.extractor, name: self.net.parts[name]}, frozen={name: head}
        )
        return fit(loss, extractor, data, stage=stage, epochs=self.epochs, optimiser=self.optimiser)

    def classify(self, parts: Mapping[str, Params], x: Tensor, head: str = "head") -> Tensor:
        """The plain prediction: a head of the net's size on `features`; a fixed head that is not among the parts is drawn."""
        part = self.net.parts[head]
        params = part.init() if self.fixed_head and head not in parts else parts[head]
        return part.frozen(params, self.features(dict(parts), x))

    def resumed(self, kept: Params, w: Parts) -> Any:
        """The state of an optimiser of w, from how a client keeps it."""
        return tree.shaped(kept, self.optimiser.init(tree.parameters(w)))
