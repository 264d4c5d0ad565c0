"""MobileNetV1 and torchvision's MobileNetV2 as extractors (3.2 M and 2.2 M parameters), with stride 1 in the stem for small images."""

from torch import Tensor, nn

from edge_fl.inputs import InputSpec
from edge_fl.models.resnet import SMALL

V1 = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))
"""Channels and stride of each depthwise separable convolution (Howard et al., arXiv:1704.04861, Table 1)."""


class MobileNetV1(nn.Module):
    """MobileNetV1 without its classifier; features [N, 1024 * width]; width: times the numbers of channels, 0.25 to 1."""

    def __init__(self, input: InputSpec, width: float = 1.0) -> None:
        super().__init__()
        channels = max(int(32 * width), 8)
        stride = 1 if min(input.height, input.width) < SMALL else 2
        layers = _normalised(nn.Conv2d(input.channels, channels, 3, stride, 1, bias=False))
        for full, stride in V1:
            out = max(int(full * width), 8)
            layers += _normalised(nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False))
            layers += _normalised(nn.Conv2d(channels, out, 1, bias=False))
            channels = out
        self.network = nn.Sequential(*layers)
        self.feature_dim = channels

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).mean((2, 3))  # type: ignore[no-any-return]


def _normalised(convolution: nn.Conv2d) -> list[nn.Module]:
    return [convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU()]


class MobileNet(nn.Module):
    """torchvision's MobileNetV2 without its classifier; features [N, 1280]; width: times the numbers of channels, 0.25 to 1.4."""

    def __init__(self, input: InputSpec, width: float = 1.0) -> None:
        super().__init__()
        import torchvision  # takes seconds

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
