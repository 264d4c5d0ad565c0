"""torchvision's MobileNetV2 as an extractor (about 2.2 M parameters), with stride 1 in the stem for small images."""

from __future__ import annotations

import torchvision
from torch import Tensor, nn

from edge_fl.config import InputSpec
from edge_fl.models.resnet import SMALL


class MobileNet(nn.Module):
    """torchvision's MobileNetV2 without its classifier; features [N, 1280]."""

    def __init__(self, input: InputSpec, width: float) -> None:
        super().__init__()
        network = torchvision.models.mobilenet_v2(weights=None, width_mult=width)
        stem = network.features[0][0]
        stride = 1 if min(input.height, input.width) < SMALL else 2
        network.features[0][0] = nn.Conv2d(
            input.channels, stem.out_channels, 3, stride=stride, padding=1, bias=False
        )
        self.network = network.features
        self.feature_dim = int(network.last_channel)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).mean((2, 3))  # type: ignore[no-any-return]


def mobilenet(input: InputSpec, width: float = 1.0) -> nn.Module:
    """`width` multiplies the numbers of channels (0.25 to 1.4)."""
    return MobileNet(input, width)
