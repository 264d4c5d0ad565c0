"""Network architectures by name. A model builds an extractor (samples -> features); extractor and head form a `Net`.

A model is a function `(input, **options) -> Module` whose module has an int attribute `feature_dim`, and a line in MODELS. A model outside
this package is named `package.module:function_or_Class`. Pretrained networks are in `edge_fl.models.backbones`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import msgspec
from torch import nn

from edge_fl import plugins
from edge_fl.config import ModelConfig
from edge_fl.errors import MethodError, brief, nearest
from edge_fl.inputs import InputSpec
from edge_fl.learn.network.part import Net, linear_head
from edge_fl.learn.random import seeded
from edge_fl.modalities import ABOUT
from edge_fl.models import audio, backbones, cnn, frozen, kernels, mobilenet, own, resnet, series, weights
from edge_fl.models.frozen import Frozen
from edge_fl.models.normalise import Normalised

MODELS: dict[str, Callable[..., nn.Module]] = {
    "cnn-tiny": cnn.tiny,
    "cnn2": cnn.cnn2,
    "cnn2-bn": cnn.cnn2_bn,
    "cnn4": cnn.cnn4,
    "resnet18": resnet.resnet18,
    "resnet34": resnet.resnet34,
    "mobilenet": mobilenet.MobileNet,
    "mobilenet-v1": mobilenet.MobileNetV1,
    "cnn1d": series.cnn1d,
    "mlp": series.mlp,
    "identity": series.identity,
    "audio-cnn": audio.AudioCnn,
    "random-kernels": kernels.RandomKernels,
}
FIXED = ("identity", "random-kernels")
"""Models without trained tensors."""


def build_net(model: ModelConfig, input: InputSpec, classes: int, seed: int = 0) -> Net:
    """A net with the parts "extractor" and "head", initialised from `seed`. Raises MethodError."""
    if classes < 2:
        raise MethodError(f"model {model.name}: {classes} class, expected at least 2")

    def extractor() -> nn.Module:
        return Normalised(_build(model, input), input)

    with seeded(0):
        feature_dim = extractor().feature_dim
    net = Net(input, classes, feature_dim, seed).with_part("extractor", extractor)  # type: ignore[arg-type]
    return net.with_part("head", lambda: linear_head(net))


def backbone_input(model: ModelConfig) -> InputSpec | None:
    """The input of a backbone's weights, in the size of its option `size`; None for other models. Raises MethodError."""
    backbone = backbones.find(model.name)
    return backbones.input_of(model, backbone) if backbone else None


def with_pinned_weights(model: ModelConfig) -> ModelConfig:
    """The model with the sha256 of its file of weights, if it has one, for other machines. Raises MethodError if the file is missing.

    One that has nothing to train is frozen.
    """
    backbone = backbones.find(model.name)
    path = weights.locate(model.name, model.weights, backbone and backbone.source)
    train = "none" if model.name in FIXED else model.train
    return msgspec.structs.replace(model, weights=weights.pinned(model.weights, path), train=train)


def is_own(model: ModelConfig) -> bool:
    """Whether a model is the user's own code, not of MODELS and no backbone."""
    return plugins.is_own(model.name) and not backbones.is_backbone(model.name)


def require_usable(model: ModelConfig, input: InputSpec) -> None:
    """Try a model of the user's own before a run, without effect for another one. Raises MethodError for one that no run could use."""
    if is_own(model):
        with seeded(0):
            module = _own(model, input)
        own.require_usable(module, model.name, input, trained=model.train == "all")


def _build(model: ModelConfig, input: InputSpec) -> nn.Module:
    size = "x".join(map(str, input.shape))
    try:
        backbone = backbones.find(model.name)
        network = backbones.build(model, backbone, input) if backbone else _own(model, input)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise MethodError(
            f"model {model.name} for {ABOUT[input.kind].samples} {size}: {brief(' '.join(str(error).split()))}"
        ) from error
    if model.train == "lora":
        return frozen.Adapted(network, model.name, model.rank)
    return Frozen(network) if model.train == "none" else network


def _own(model: ModelConfig, input: InputSpec) -> nn.Module:
    build = _find(model.name)
    known = inspect.signature(build).parameters
    for option in model.options:
        if option not in known and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            raise MethodError(
                f"model {model.name}: unknown option {option!r}{nearest(option, list(known)[1:])}"
            )
    module = _called(build, model, input) if plugins.is_own(model.name) else build(input, **model.options)
    if not (isinstance(module, nn.Module) and isinstance(getattr(module, "feature_dim", None), int)):
        found = getattr(module, "feature_dim", None) if isinstance(module, nn.Module) else module
        came = f"feature_dim = {brief(found)}" if isinstance(module, nn.Module) else type(module).__name__
        raise MethodError(
            f"model {model.name}: {came}, expected a torch module with an int attribute feature_dim"
        )
    if path := weights.locate(model.name, model.weights, None):
        weights.load(module, weights.read(path), path, model.name)
    return module


def _called(build: Callable[..., Any], model: ModelConfig, input: InputSpec) -> Any:
    """The module of the user's own function or class. Raises MethodError, which names the line of an error in it."""
    try:
        return build(input, **model.options)
    except MethodError:
        raise
    except Exception as error:
        size = "x".join(map(str, input.shape))
        called = ", ".join(["input", *model.options])
        where = "" if plugins.own_line(error) else f", called with ({called})"
        raise MethodError(
            f"model {model.name} for {ABOUT[input.kind].samples} {size}: {plugins.described(error)}{where}"
        ) from error


def _find(name: str) -> Callable[..., Any]:
    if name in MODELS:
        return MODELS[name]
    if not plugins.is_own(name):
        raise MethodError(f"model {name!r}: unknown{nearest(name, [*MODELS, *backbones.NAMES])}")
    found = plugins.imported(name, "model", MethodError)
    if not callable(found):
        raise MethodError(f"model {name!r}: {type(found).__name__}, expected a function or a class")
    return found  # type: ignore[no-any-return]
