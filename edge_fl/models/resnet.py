"""torchvision's ResNet-18 and ResNet-34 as extractors, with a small stem for small images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

from edge_fl.errors import DataError, MethodError
from edge_fl.inputs import InputSpec

SMALL = 64  # pixels per side; below, the 7x7 stem and the max-pool lose too much detail


class ResNet(nn.Module):
    """torchvision's network without its classifier; features [N, 512]."""

    def __init__(self, network: nn.Module, input: InputSpec) -> None:
        super().__init__()
        self.network = network
        self.feature_dim = int(network.fc.in_features)  # type: ignore[union-attr, arg-type]
        network.fc = nn.Identity()
        if min(input.height, input.width) < SMALL:
            network.conv1 = nn.Conv2d(input.channels, 64, 3, stride=1, padding=1, bias=False)
            network.maxpool = nn.Identity()
        elif input.channels != 3:
            network.conv1 = nn.Conv2d(input.channels, 64, 7, stride=2, padding=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)  # type: ignore[no-any-return]


def resnet18(input: InputSpec, weights: str = "") -> nn.Module:
    """ResNet-18, 11 M parameters. `weights`: "" for random, "imagenet" for torchvision's (from its cache, never downloaded here)."""
    return _resnet(torchvision.models.resnet18, "ResNet18_Weights", input, weights)


def resnet34(input: InputSpec, weights: str = "") -> nn.Module:
    """ResNet-34, 21 M parameters. `weights` as for `resnet18`."""
    return _resnet(torchvision.models.resnet34, "ResNet34_Weights", input, weights)


def _resnet(build: Callable[..., nn.Module], enum: str, input: InputSpec, weights: str) -> nn.Module:
    network = build(weights=None)
    if weights:
        if weights != "imagenet" or input.channels != 3 or min(input.height, input.width) < SMALL:
            raise MethodError(
                f"weights {weights!r}: expected 'imagenet' with 3 channels and {SMALL} pixels or more"
            )
        _load_imagenet(network, enum)
    return ResNet(network, input)


def _load_imagenet(network: nn.Module, enum: str) -> None:
    """Load torchvision's default weights from the local cache. Raises DataError if the file is missing."""
    url = getattr(torchvision.models, enum).DEFAULT.url
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(url).name
    if not path.is_file():
        raise DataError(f"{path}: not found; put torchvision's {path.name} into that folder")
    # The files have torch's format; weights_only reads nothing but tensors.
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))  # noqa: TID251
