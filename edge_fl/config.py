"""Settings of a method: those of its network, its training and what is sent. `MethodSpec` has all that rebuilds it on another machine."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from edge_fl.inputs import InputSpec

Fraction = Annotated[float, Meta(gt=0, le=1)]
Option = bool | int | float | str | Annotated[list[bool | int | float | str], Meta(max_length=1024)]
Options = Annotated[dict[str, Option], Meta(max_length=64)]
MAX_CLASSES = 1024


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A network of `edge_fl.models` by name, with its options (`feature_dim`, ...).

    weights: initial weights of a backbone: "" for its pretrained ones, "random", or a file.
    train: the tensors of the extractor that are trained and shared: all, none, or low-rank adapters of `rank` ("lora").
    """

    name: str = "cnn-tiny"
    options: Options = {}
    weights: str = ""
    train: Literal["all", "none", "lora"] = "all"
    rank: Annotated[int, Meta(ge=1, le=256)] = 2


class OptimiserConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`lr_steps` lists (round, factor): from that round (counted from 1) on, the learning rate is lr * factor."""

    name: Literal["sgd", "adam"] = "sgd"
    lr: Annotated[float, Meta(gt=0)] = 0.05
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    lr_steps: Annotated[list[tuple[int, float]], Meta(max_length=1024)] = []


Augment = Literal["none", "crop", "gentle", "flip-rotate", "supcon", "jitter"]
BatchNormPolicy = Literal["", "sync", "local_stats", "local_bn"]


class MethodConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A method of `edge_fl.methods` by name; `options` are its hyper-parameters (`edge-fl methods show NAME`).

    For any method: `augment` changes the training samples (`edge_fl.learn.augment`; `none` and `jitter` suit every kind of sample),
    `projector` adds DualFed's projector to the extractor, `batch_norm` replaces the method's BatchNorm policy ("": its own).
    """

    name: str = "fedavg"
    epochs: Annotated[int, Meta(ge=0)] = 1
    batch_size: Annotated[int, Meta(ge=1)] = 32
    optimiser: OptimiserConfig = OptimiserConfig()
    options: Options = {}
    augment: Augment = "none"
    projector: bool = False
    batch_norm: BatchNormPolicy = ""


class CompressionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Compression of updates (`edge_fl.learn.codec.compression`); `keep` is the share of values that topk sends."""

    kind: Literal["none", "fp16", "int8", "topk"] = "none"
    keep: Fraction = 0.1


class PrivacyConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Differential privacy of updates (`edge_fl.learn.codec.differential_privacy`); `noise_multiplier` 0 turns it off.

    An update's change is clipped to an L2 norm of `clip` and gets Gaussian noise of std `noise_multiplier` * `clip`. A client takes part
    as long as its next update keeps its epsilon at `delta` within `budget` (0: no limit).
    """

    noise_multiplier: Annotated[float, Meta(ge=0)] = 0.0
    clip: Annotated[float, Meta(gt=0)] = 0.1
    budget: Annotated[float, Meta(ge=0)] = 0.0
    delta: Annotated[float, Meta(gt=0, lt=1)] = 1e-5


class MethodSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that rebuilds a method on another machine: network, input, classes, method, seed, the update codec's settings, the run's
    number of rounds, and how often clients are evaluated (0: unknown, never).
    """

    model: ModelConfig
    input: InputSpec
    classes: Annotated[list[str], Meta(max_length=MAX_CLASSES)]
    method: MethodConfig
    seed: int
    compression: CompressionConfig = CompressionConfig()
    privacy: PrivacyConfig = PrivacyConfig()
    rounds: Annotated[int, Meta(ge=0)] = 0
    evaluate_every: Annotated[int, Meta(ge=0)] = 0
