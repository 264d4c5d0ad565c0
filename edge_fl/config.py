"""What a person can set: a recipe in TOML, read into frozen structs. An unknown key is an error that names the nearest known one.

A recipe reproduces one run: data, model, method, cohort, releases, broker. `TaskSpec` is the part of it that a device needs to
rebuild the same method, and travels as it stands here.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from edge_fl.config_errors import explain, place
from edge_fl.errors import ConfigError

S = TypeVar("S", bound=Struct)
Source = Literal["simulated", "fleet", "hybrid"]
Engine = Literal["auto", "sequential", "pool", "vector", "ray"]
Precision = Literal["fp32", "bf16", "fp16"]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Option = bool | int | float | str | list[bool | int | float | str]


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A network of `edge_fl.models` by name, with its options (`feature_dim`, ...)."""

    name: str = "cnn-tiny"
    options: dict[str, Option] = {}


class OptimiserConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`lr_steps` lists (round, factor): from that round on, counted from 1, the learning rate is lr * factor."""

    name: Literal["sgd", "adam"] = "sgd"
    lr: Annotated[float, Meta(gt=0)] = 0.05
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    lr_steps: list[tuple[int, float]] = []


class MethodConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A method of `edge_fl.methods` by name; `options` are its own hyper-parameters (`edge-fl methods show NAME`)."""

    name: str = "fedavg"
    epochs: Annotated[int, Meta(ge=0)] = 1
    batch_size: Annotated[int, Meta(ge=1)] = 32
    optimiser: OptimiserConfig = OptimiserConfig()
    options: dict[str, Option] = {}


class MethodChange(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What another method of the same comparison does differently from the recipe's [method]; what is left out stays as there."""

    epochs: Annotated[int, Meta(ge=0)] | None = None
    batch_size: Annotated[int, Meta(ge=1)] | None = None
    optimiser: OptimiserConfig | None = None
    options: dict[str, Option] = {}


class DataConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A dataset of `edge_fl.data`, split over clients; `fraction` keeps a share of the samples (to scale a run down).

    `max_train` is the most training samples a client keeps (0: all). Of the `clients`, `unseen` never train: the global model meets
    them after the last round.
    """

    dataset: str = "digits"
    data_dir: str = ".data"
    clients: Annotated[int, Meta(ge=1)] = 12
    partition: Literal["dirichlet", "pathological", "domain", "iid"] = "dirichlet"
    beta: Annotated[float, Meta(gt=0)] = 0.3
    classes_per_client: Annotated[int, Meta(ge=1)] = 2
    test_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.25
    validation_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    max_train: Annotated[int, Meta(ge=0)] = 0
    unseen: Annotated[int, Meta(ge=0)] = 0
    fraction: Fraction = 1.0


class CohortConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Who takes part in a round and when it ends.

    The goal is max(floor(participation * N), 1) updates (with `participation_from` above 0 every round draws its own share between
    that and `participation`). `over_select` times as many clients are asked, since some always drop out (not in simulation, where
    nobody does); a round ends with the goal, or at `deadline_s` if `quorum` of the goal is there. Otherwise it is abandoned and
    asked anew, `attempts` times in all. A round waits up to `wait_s` for `min_devices` before it starts.

    With a `buffer_size` above 0 aggregation is asynchronous (FedBuff): so many updates end a round, whichever round they began in, at
    most `max_staleness` ago; the others stay at work, and as many are asked anew as the cohort then lacks.
    """

    participation: Fraction = 1.0
    participation_from: Annotated[float, Meta(ge=0, le=1)] = 0.0
    quorum: Fraction = 0.5
    over_select: Annotated[float, Meta(ge=1)] = 1.3
    deadline_s: Annotated[float, Meta(gt=0)] = 120.0
    attempts: Annotated[int, Meta(ge=1, le=100)] = 3
    min_devices: Annotated[int, Meta(ge=1)] = 1
    wait_s: Annotated[float, Meta(gt=0)] = 120.0
    buffer_size: Annotated[int, Meta(ge=0)] = 0
    max_staleness: Annotated[int, Meta(ge=0, le=1000)] = 10


class GateConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What ends a roll-out (`server.release.rollout.gates`). `false_abort` is the chance, at most, that one ends though nothing is wrong.

    Losses are shares of accuracy (0.02 is 2 points); `spread` is what a device's accuracy moves by when nothing is wrong.
    """

    false_abort: Annotated[float, Meta(gt=0, lt=1)] = 0.02
    mean_loss: Annotated[float, Meta(gt=0, le=1)] = 0.03
    decile_loss: Annotated[float, Meta(gt=0, le=1)] = 0.10
    spread: Annotated[float, Meta(gt=0, le=1)] = 0.02
    slower: Annotated[float, Meta(gt=1)] = 2.0


class RolloutConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a release reaches the fleet: `stages` are growing shares of the devices, the last one 1 ([1.0]: everybody at once).

    "auto" is 5 %, 25 % and 100 % where at least 20 head-only devices are there and there is a release to go back to, and everybody
    at once elsewhere. The next stage begins when `success` of the one before made it; a device that is there has `stage_wait_s` to answer.
    """

    stages: Annotated[tuple[Fraction, ...], Meta(min_length=1, max_length=16)] | Literal["auto"] = "auto"
    success: Fraction = 0.9
    stage_wait_s: Annotated[float, Meta(gt=0)] = 600.0
    gates: GateConfig = GateConfig()

    def __post_init__(self) -> None:
        if self.stages == "auto":
            return
        if list(self.stages) != sorted(set(self.stages)) or self.stages[-1:] != (1,):
            raise ValueError(f"stages {list(self.stages)}: expected growing shares that end with 1")


class ValidationConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What an update must be to count, and how much one may move the mean.

    An update is refused when one of its parts is `max_growth` times as long (L2 norm) as what was sent down, plus 1 (0: any length).
    After `quarantine_after` refused updates (0: never) nothing of a device counts any more. `centre`, `trim` and `clip` are those of
    `edge_fl.learn.aggregation.robust`.
    """

    max_growth: Annotated[float, Meta(ge=0)] = 1000.0
    quarantine_after: Annotated[int, Meta(ge=0)] = 3
    centre: Literal["mean", "median", "trimmed"] = "mean"
    trim: Annotated[float, Meta(ge=0, lt=0.5)] = 0.1
    clip: Annotated[float, Meta(ge=0)] = 0.0


class CompressionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How the updates of clients that train are made smaller (`edge_fl.learn.codec.compression`); `keep` is the share of values that topk sends."""

    kind: Literal["none", "fp16", "int8", "topk"] = "none"
    keep: Fraction = 0.1


class PrivacyConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Noise on what clients send (`edge_fl.learn.codec.privacy`); `noise_multiplier` 0: none.

    An update's change has an L2 norm of `clip` at most and gets Gaussian noise of std `noise_multiplier` * `clip`. A client takes part
    until its next update would tell more than epsilon `budget` at `delta` (0: for ever).
    """

    noise_multiplier: Annotated[float, Meta(ge=0)] = 0.0
    clip: Annotated[float, Meta(gt=0)] = 0.1
    budget: Annotated[float, Meta(ge=0)] = 0.0
    delta: Annotated[float, Meta(gt=0, lt=1)] = 1e-5


class QuantiseConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether releases come in 8-bit whole numbers too, calibrated on `images` images, and what they must keep of the floats' quality."""

    int8: bool = False
    images: Annotated[int, Meta(ge=1, le=4096)] = 128
    min_cosine: Annotated[float, Meta(ge=0, le=1)] = 0.98
    max_loss: Annotated[float, Meta(ge=0, le=1)] = 0.02


class ReleaseConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When an extractor is released: every `every` rounds (0: only after the last), and how long heads may take to report.

    `website` is a folder for a web server, which has every release before devices are told of it, and from then on whatever is published
    ("": as it was before).
    """

    every: Annotated[int, Meta(ge=0)] = 0
    heads: Annotated[int, Meta(ge=0)] = 0
    wait_s: Annotated[float, Meta(gt=0)] = 60.0
    website: str = ""
    rollout: RolloutConfig = RolloutConfig()
    quantise: QuantiseConfig = QuantiseConfig()


class BrokerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the broker is (port 0: 8883 with an identity, else 1883), the fleet's name in every topic, and the server's identity."""

    host: Annotated[str, Meta(pattern=r"^[^\s/@]+\Z")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    identity: str = ""
    fleet: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,32}\Z")] = "main"


class CompareConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a paper: its methods, each run from `seeds` seeds. Without methods, the recipe is a run of its own."""

    methods: list[str] = []
    seeds: Annotated[int, Meta(ge=1)] = 3


class Recipe(Struct, frozen=True, forbid_unknown_fields=True):
    """One run, complete. `methods` says what changes when another method than [method] runs under it.

    `engine` says how simulated clients are trained (server/fleets), `precision` what networks compute in while they train there.
    """

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9.-]{0,63}\Z")] = "run"
    seed: Annotated[int, Meta(ge=0)] = 0
    rounds: Annotated[int, Meta(ge=0)] = 5
    source: Source = "simulated"
    device: str = "auto"
    engine: Engine = "auto"
    precision: Precision = "fp32"
    evaluate_every: Annotated[int, Meta(ge=0)] = 1
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
    broker: BrokerConfig = BrokerConfig()


class InputSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Images as the extractor takes them: raw 0..1 pixels [channels, height, width]; mean and std are applied inside."""

    channels: Annotated[int, Meta(ge=1, le=16)]
    height: Annotated[int, Meta(ge=1, le=4096)]
    width: Annotated[int, Meta(ge=1, le=4096)]
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        return self.channels, self.height, self.width


class MethodSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """All that rebuilds a method somewhere else: network, input, classes, method, the run's seed, and how updates travel."""

    model: ModelConfig
    input: InputSpec
    classes: list[str]
    method: MethodConfig
    seed: int
    compression: CompressionConfig = CompressionConfig()
    privacy: PrivacyConfig = PrivacyConfig()


def load(path: Path) -> Recipe:
    """A recipe from a TOML file. Raises ConfigError, which names the file, the key and the nearest known key."""
    return convert(read(path), str(path))


def read(path: Path) -> dict[str, Any]:
    """What a TOML file says, as nested dicts, not yet a recipe. Raises ConfigError."""
    expected = "expected settings in TOML"
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; {expected}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {expected}") from error
    return _tree(text, str(path))


def parse(text: str, where: str = "recipe") -> Recipe:
    """A recipe from TOML text; `where` opens every error message."""
    return convert(_tree(text, where), where)


def _tree(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: not TOML ({error})") from error


def convert(tree: dict[str, Any], where: str = "recipe") -> Recipe:
    """A recipe from nested dicts. Raises ConfigError."""
    return checked(tree, Recipe, where)


def checked(tree: dict[str, Any], kind: type[S], where: str) -> S:
    """Settings of any kind from nested dicts, every number finite. Raises ConfigError, which names the key and the nearest known one."""
    try:
        settings = msgspec.convert(tree, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{where}: {explain(str(error), tree, kind)}") from error
    for keys, value in _numbers(tree):
        if not math.isfinite(value):
            raise ConfigError(f"{where}: {place(keys)} = {value}: expected a finite number")
    return settings


def with_settings(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """The recipe with `settings` such as "rounds=3" or "method.options.temperature=0.5" (TOML values; bare words are strings)."""
    tree = msgspec.to_builtins(recipe)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"setting {setting!r}: expected key=value, such as rounds=3")
        table, *rest = [tree, *key.strip().split(".")]
        for name in rest[:-1]:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"setting {setting!r}: {name} holds a value, not a table")
        table[rest[-1]] = parse_value(value.strip())
    return convert(tree, "settings")


def parse_value(text: str) -> Any:
    """A value as TOML writes it; what TOML does not know is text, so that bare words need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def dump(recipe: Recipe) -> str:
    """The recipe as TOML, every value written out."""
    return msgspec.toml.encode(recipe).decode()


def _numbers(tree: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every float in nested dicts and lists, with the keys that lead to it."""
    match tree:
        case float():
            yield keys, tree
        case dict():
            for key, value in tree.items():
                yield from _numbers(value, (*keys, str(key)))
        case list() | tuple():
            for value in tree:
                yield from _numbers(value, keys)
