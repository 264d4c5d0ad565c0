"""ResNet-18 and ResNet-34 of torchvision as extractors, with the stem that small images need."""

from __future__ import annotations

from collections.abc import Callable

import torchvision
from torch import Tensor, nn

from edge_fl.config import InputSpec
from edge_fl.errors import MethodError
from edge_fl.models.weights import load_imagenet

SMALL = 64  # pixels a side below which the 7x7 stem and the max-pool throw away too much


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
    """11 M parameters. `weights`: "" for random, "imagenet" for torchvision's (from its cache, never downloaded here)."""
    return _resnet(torchvision.models.resnet18, "ResNet18_Weights", input, weights)


def resnet34(input: InputSpec, weights: str = "") -> nn.Module:
    """21 M parameters. `weights` as for `resnet18`."""
    return _resnet(torchvision.models.resnet34, "ResNet34_Weights", input, weights)


def _resnet(build: Callable[..., nn.Module], enum: str, input: InputSpec, weights: str) -> nn.Module:
    network = build(weights=None)
    if weights:
        if weights != "imagenet" or input.channels != 3 or min(input.height, input.width) < SMALL:
            raise MethodError(
                f"weights {weights!r}: expected 'imagenet' with 3 channels and {SMALL} pixels or more"
            )
        load_imagenet(network, enum)
    return ResNet(network, input)
