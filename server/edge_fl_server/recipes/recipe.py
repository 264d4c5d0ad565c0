"""A recipe: all settings of a run, in TOML, read into frozen structs. It reproduces one run.

`edge_fl.config` has the settings of the method, which devices get, too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from edge_fl import toml
from edge_fl.config import (
    Augment,
    BatchNormPolicy,
    CompressionConfig,
    Fraction,
    MethodConfig,
    ModelConfig,
    OptimiserConfig,
    Options,
    PrivacyConfig,
)
from edge_fl.data.partition import DataConfig
from edge_fl.fields import Name
from edge_fl.files import paths
from edge_fl.heads.plan import Serves
from edge_fl.inputs import InputSpec
from edge_fl.toml import apply, checked, parse_value, read

Source = Literal["simulated", "fleet", "hybrid", "none"]
Precision = Literal["fp32", "bf16", "fp16"]


class MethodChange(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Overrides of the recipe's [method] for another method of the same comparison; None keeps the recipe's value."""

    epochs: Annotated[int, Meta(ge=0)] | None = None
    batch_size: Annotated[int, Meta(ge=1)] | None = None
    optimiser: OptimiserConfig | None = None
    options: Options = {}
    augment: Augment | None = None
    projector: bool | None = None
    batch_norm: BatchNormPolicy | None = None


class CohortConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Which clients a round selects, and when it ends.

    The goal is max(floor(participation * N), 1) updates; with `participation_from` above 0 every round draws its share between that and
    `participation`. On devices, `over_select` times as many clients are selected, because some drop out. A round ends when the goal is
    reached, or at `deadline_s` if `quorum` of the goal has responded; otherwise it is repeated, up to `attempts` times in all. A round
    waits up to `wait_s` for `min_devices` before it starts. `where` selects the devices that take part (docs/tags.md; "": all).

    With a `buffer_size` above 0 aggregation is asynchronous (FedBuff): a round ends after that many updates, each begun at most
    `max_staleness` rounds ago; the other clients keep working, and only the missing part of the cohort is selected anew.

    In simulation, the updates of `drop_out` of a round's clients are lost, `slow_training` of all clients train only half of the epochs,
    and with a buffer the updates of `slow_sending` of all clients take four times as long (PFLlib's -cdr, -tsr and -ssr).
    """

    participation: Fraction = 1.0
    participation_from: Annotated[float, Meta(ge=0, le=1)] = 0.0
    quorum: Fraction = 0.5
    over_select: Annotated[float, Meta(ge=1)] = 1.3
    deadline_s: Annotated[float, Meta(gt=0)] = 120.0
    attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    min_devices: Annotated[int, Meta(ge=1)] = 1
    wait_s: Annotated[float, Meta(gt=0)] = 120.0
    where: str = ""
    buffer_size: Annotated[int, Meta(ge=0)] = 0
    max_staleness: Annotated[int, Meta(ge=0, le=1000)] = 10
    drop_out: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    slow_training: Annotated[float, Meta(ge=0, le=1)] = 0.0
    slow_sending: Annotated[float, Meta(ge=0, le=1)] = 0.0

    @property
    def mean_participation(self) -> float:
        """Share of the clients that a round selects, on average over the rounds."""
        least = min(self.participation_from or self.participation, self.participation)
        return (least + self.participation) / 2

    def __post_init__(self) -> None:
        if self.drop_out + self.quorum > 1 + 1e-9:
            raise ValueError(
                f"drop_out {self.drop_out:g} and quorum {self.quorum:g}: expected at most 1 together"
            )


class GateConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Thresholds that abort a roll-out. `false_abort` bounds the probability of an abort without cause, and that of a pause without one.

    `mean_loss` and `decile_loss` are the smallest losses that the gates look for, as shares of accuracy (0.02 is 2 points); `spread` is
    the standard deviation of a device's change in accuracy that counts as normal.
    """

    false_abort: Annotated[float, Meta(gt=0, lt=1)] = 0.02
    mean_loss: Annotated[float, Meta(gt=0, le=1)] = 0.03
    decile_loss: Annotated[float, Meta(gt=0, le=1)] = 0.10
    spread: Annotated[float, Meta(gt=0, le=1)] = 0.02
    slower: Annotated[float, Meta(gt=1)] = 2.0


class RolloutConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Stages of a roll-out: growing shares of the devices, the last one 1 ([1.0]: all devices at once).

    "auto" is 5 %, 25 % and 100 % with at least 12 head-only devices online (`release.rollout.stages.CAREFUL_FROM`) and an earlier release
    to go back to, otherwise all at once.
    The next stage begins when `success` of the devices succeeded; an online device has `stage_wait_s` to respond. Devices that `where`
    does not select keep their release (docs/tags.md; "": all are selected).
    """

    stages: Annotated[tuple[Fraction, ...], Meta(min_length=1, max_length=16)] | Literal["auto"] = "auto"
    success: Fraction = 0.9
    stage_wait_s: Annotated[float, Meta(gt=0)] = 600.0
    where: str = ""
    gates: GateConfig = GateConfig()

    def __post_init__(self) -> None:
        if self.stages == "auto":
            return
        if list(self.stages) != sorted(set(self.stages)) or self.stages[-1:] != (1,):
            raise ValueError(f"stages {list(self.stages)}: expected growing shares that end with 1")


class ValidationConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Validation of updates, and robust aggregation.

    An update is rejected if the L2 norm of one of its parts exceeds `max_growth` times that of the broadcast part plus 1 (0: no limit).
    A device's update weighs at most `max_weight` times the cohort's median of announced samples (0: no limit): devices can claim any.
    A device's change larger than `max_norm` times the cohort's is reduced to that, tensor by tensor, and outliers are dropped
    (`edge_fl.learn.aggregation.screening`; 0: no screening). After `quarantine_after` rejected or dropped updates (0: never) a device is
    quarantined. `centre`, `trim` and `clip` are those of `edge_fl.learn.aggregation.robust`.
    `panel` is the share of a round's clients that compare its outcome with the shared parts before it, on their validation images; a
    round that makes them worse is dropped or repaired (`edge_fl_server.training.gate`). 0: none; "auto": a fifth where devices train, from
    eight full devices on, and none in simulation.
    """

    max_growth: Annotated[float, Meta(ge=0)] = 100.0
    max_weight: Annotated[float, Meta(ge=0)] = 3.0
    max_norm: Annotated[float, Meta(ge=0)] = 3.0
    quarantine_after: Annotated[int, Meta(ge=0)] = 3
    centre: Literal["mean", "median", "trimmed", "geometric"] = "mean"
    trim: Annotated[float, Meta(ge=0, lt=0.5)] = 0.1
    clip: Annotated[float, Meta(ge=0)] = 0.0
    panel: Annotated[float, Meta(ge=0, le=1)] | Literal["auto"] = "auto"


class QuantiseConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Int8 variants of releases, calibrated on `images` images; a variant below `min_cosine` or above `max_loss` is not released."""

    int8: bool = False
    images: Annotated[int, Meta(ge=1, le=4096)] = 128
    min_cosine: Annotated[float, Meta(ge=0, le=1)] = 0.98
    max_loss: Annotated[float, Meta(ge=0, le=1)] = 0.02


class ReleaseConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Release an extractor every `every` rounds (0: only after the last); wait up to `wait_s` for at least `heads` and all present devices.

    `website` is a folder for a web server; each release is exported to it before devices are assigned to it ("": as configured earlier).
    `serves`: devices adapt the fleet's head to their labels ("fleet"), or fit the method's own head ("way").
    """

    every: Annotated[int, Meta(ge=0)] = 0
    heads: Annotated[int, Meta(ge=0)] = 0
    wait_s: Annotated[float, Meta(gt=0)] = 60.0
    website: str = ""
    serves: Serves = "fleet"
    rollout: RolloutConfig = RolloutConfig()
    quantise: QuantiseConfig = QuantiseConfig()


class StatisticsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Sums of class statistics over devices (docs/class-statistics.md); fewer than `minimum` devices send nothing.

    "auto": masked where the server has a certificate and the method's releases use a prior, otherwise none. Between runs a server collects
    once in `every_s` at most.
    """

    sums: Literal["auto", "none", "masked", "plain"] = "auto"
    minimum: Annotated[int, Meta(ge=3, le=100)] = 5
    clip: Annotated[float, Meta(ge=0)] = 0.0
    noise_multiplier: Annotated[float, Meta(ge=0)] = 0.0
    every_s: Annotated[float, Meta(gt=0)] = 3600.0


class BrokerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Address of the broker (port 0: 8883 with an identity, else 1883), the fleet's name in every topic, and the server's identity."""

    host: Annotated[str, Meta(pattern=r"^[^\s/@]+\Z")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    identity: str = ""
    fleet: Name = "main"


class CompareConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a paper: methods, each run with `seeds` seeds. Without methods the recipe is a single run."""

    methods: list[str] = []
    seeds: Annotated[int, Meta(ge=1)] = 3


class Recipe(Struct, frozen=True, forbid_unknown_fields=True):
    """All settings of one run. `methods` overrides settings for a run with another method than [method].

    `engine` selects how simulated clients are trained (`edge_fl_server.training.engines`), `precision` the number format of their networks.
    `input` is the extractor's input; by default that of the backbone, or of the dataset's images.
    `heads` are kinds of personal heads (`edge_fl.heads`, or `package.module:Class`) that simulated clients fit on the final extractor, too,
    from their own data alone; "served": the head that a device serves, also of clients that never train.
    """

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9.-]{0,63}\Z")] = "run"
    seed: Annotated[int, Meta(ge=0)] = 0
    rounds: Annotated[int, Meta(ge=0)] = 5
    source: Source = "simulated"
    device: str = "auto"
    engine: str = "auto"
    precision: Precision = "fp32"
    evaluate_every: Annotated[int, Meta(ge=0)] = 1
    heads: list[str] = []
    input: InputSpec | None = None
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    methods: dict[str, MethodChange] = {}
    compare: CompareConfig = CompareConfig()
    cohort: CohortConfig = CohortConfig()
    compression: CompressionConfig = CompressionConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    validation: ValidationConfig = ValidationConfig()
    release: ReleaseConfig = ReleaseConfig()
    statistics: StatisticsConfig = StatisticsConfig()
    broker: BrokerConfig = BrokerConfig()


def load(path: Path) -> Recipe:
    """Read a recipe from a TOML file. Raises ConfigError, which names the file, the key and the nearest known key."""
    return convert(read(path), paths.text(path))


def parse(text: str, where: str = "recipe") -> Recipe:
    """Read a recipe from TOML text; `where` starts every error message."""
    return convert(toml.parse(text, where), where)


def convert(tree: dict[str, Any], where: str = "recipe") -> Recipe:
    """Convert nested dicts to a recipe. Raises ConfigError."""
    return checked(tree, Recipe, where)


def with_settings(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """Apply `settings` such as "rounds=3" or "method.options.temperature=0.5" (TOML values; bare words are strings) to a recipe.

    Another model or method does not keep the options of the recipe's, nor another model the rest of [model].
    """
    tree = msgspec.to_builtins(recipe)
    for key, _, value in (setting.partition("=") for setting in settings):
        kind, _, name = key.strip().partition(".")
        if (
            name == "name"
            and kind in ("model", "method")
            and parse_value(value.strip()) != tree[kind]["name"]
        ):
            tree[kind] |= {"options": {}} if kind == "method" else msgspec.to_builtins(ModelConfig())
    apply(settings, tree)
    return convert(tree, "settings")


def dump(recipe: Recipe) -> str:
    """Format a recipe as TOML with every value written out; TOML has no null."""
    given = {key: value for key, value in msgspec.to_builtins(recipe).items() if value is not None}
    return msgspec.toml.encode(given).decode()
