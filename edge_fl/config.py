"""What a person can set: a recipe in TOML, read into frozen structs. An unknown key is an error that names the nearest known one.

A recipe reproduces one run: data, model, method, cohort, releases, broker. `TaskSpec` is the part of it that a device needs to
rebuild the same method, and travels as it stands here.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from edge_fl.errors import ConfigError, nearest

Source = Literal["simulated", "fleet", "hybrid"]
Fraction = Annotated[float, Meta(gt=0, le=1)]
Option = bool | int | float | str | list[bool | int | float | str]


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A network of `edge_fl.models` by name, with its options (`feature_dim`, ...)."""

    name: str = "cnn2"
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


class DataConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A dataset of `edge_fl.data`, split over clients; `fraction` keeps a share of the samples (to scale a run down)."""

    dataset: str = "digits"
    data_dir: str = ".data"
    clients: Annotated[int, Meta(ge=1)] = 12
    partition: Literal["dirichlet", "pathological", "domain", "iid"] = "dirichlet"
    beta: Annotated[float, Meta(gt=0)] = 0.3
    classes_per_client: Annotated[int, Meta(ge=1)] = 2
    test_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.25
    validation_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.1
    fraction: Fraction = 1.0


class CohortConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Who takes part in a round and when it ends: max(floor(participation * N), 1) clients, closed at `deadline_s`."""

    participation: Fraction = 1.0
    quorum: Fraction = 0.5
    over_select: Annotated[float, Meta(ge=1)] = 1.0
    deadline_s: Annotated[float, Meta(gt=0)] = 120.0
    min_devices: Annotated[int, Meta(ge=1)] = 1
    wait_s: Annotated[float, Meta(gt=0)] = 120.0


class ReleaseConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When an extractor is released: every `every` rounds (0: only after the last), and how long heads may take to report."""

    every: Annotated[int, Meta(ge=0)] = 0
    heads: Annotated[int, Meta(ge=0)] = 0
    wait_s: Annotated[float, Meta(gt=0)] = 60.0


class BrokerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the broker is, and the fleet's name in every topic."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65535)] = 1883
    fleet: Annotated[str, Meta(pattern=r"^[a-z0-9-]{1,32}$")] = "main"


class Recipe(Struct, frozen=True, forbid_unknown_fields=True):
    """One run, complete."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9.-]{0,63}$")] = "run"
    seed: Annotated[int, Meta(ge=0)] = 0
    rounds: Annotated[int, Meta(ge=0)] = 5
    source: Source = "simulated"
    device: str = "auto"
    evaluate_every: Annotated[int, Meta(ge=0)] = 1
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    method: MethodConfig = MethodConfig()
    cohort: CohortConfig = CohortConfig()
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


class TaskSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """All that rebuilds a method somewhere else: network, input, classes, method and the run's seed."""

    model: ModelConfig
    input: InputSpec
    classes: list[str]
    method: MethodConfig
    seed: int


def load(path: Path) -> Recipe:
    """A recipe from a TOML file. Raises ConfigError, which names the file, the key and the nearest known key."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a recipe in TOML; nothing was started") from error
    return parse(text, str(path))


def parse(text: str, where: str = "recipe") -> Recipe:
    """A recipe from TOML text; `where` opens every error message."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not TOML ({error}); nothing was started") from error
    return convert(tree, where)


def convert(tree: dict[str, Any], where: str = "recipe") -> Recipe:
    """A recipe from nested dicts."""
    try:
        return msgspec.convert(tree, Recipe)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_explain(str(error))}; nothing was started") from error


def dump(recipe: Recipe) -> str:
    """The recipe as TOML, every value written out."""
    return msgspec.toml.encode(recipe).decode()


def _explain(message: str) -> str:
    unknown = re.search(r"unknown field `(\w+)`(?: - at `\$\.?([\w.]*)`)?", message)
    if not unknown:
        return message
    key, table = unknown[1], unknown[2] or ""
    struct: Any = Recipe
    for name in filter(None, table.split(".")):
        struct = next((f.type for f in msgspec.structs.fields(struct) if f.name == name), Recipe)
    known = struct.__struct_fields__ if hasattr(struct, "__struct_fields__") else Recipe.__struct_fields__
    return f"[{table}] unknown key {key!r}{nearest(key, known)}" if table else f"unknown key {key!r}{nearest(key, known)}"
