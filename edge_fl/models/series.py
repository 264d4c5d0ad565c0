"""Networks for windows of series [C, T] and rows of tables [F].

A window is taken as a picture of height 1, so that its convolutions have the same gradients without autograd as those of pictures.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from edge_fl.inputs import InputSpec
from edge_fl.learn.network.chain import Chain
from edge_fl.models.cnn import Features

KERNEL, POOL, BLOCKS = 7, 4, 3


class _Rows(Chain):
    """Layers for [N, C, 1, T], applied to windows [N, C, T]."""

    def __init__(self, features: Features) -> None:
        super().__init__()
        self.features, self.feature_dim = features, features.feature_dim

    def layers(self) -> Sequence[nn.Module]:
        return _as_row, self.features  # type: ignore[return-value]


def _as_row(x: Tensor) -> Tensor:
    return x.unsqueeze(2)


def cnn1d(input: InputSpec, feature_dim: int = 64, width: int = 32, norm: bool = False) -> nn.Module:
    """Conv 7 [-> BN] -> pool by 4 -> ReLU, three times (width, 2 * width, 2 * width), then a linear layer; from 8 values of time up."""
    inputs, length, layers = input.channels, input.window, list[nn.Module]()
    for block in range(BLOCKS):
        outputs, pool = width * min(2, block + 1), min(POOL, length)
        norms: list[nn.Module] = [nn.BatchNorm2d(outputs)] if norm else []
        layers.append(nn.Conv2d(inputs, outputs, (1, KERNEL), padding=(0, KERNEL // 2)))
        layers += [*norms, nn.MaxPool2d((1, pool)), nn.ReLU()]
        inputs, length = outputs, length // pool
    row = (input.channels, 1, input.window)
    return _Rows(Features(nn.Sequential(*layers), row, feature_dim))


class Dense(Chain):
    """Flatten, then `layers`; without any, the values themselves are the features."""

    def __init__(self, input: InputSpec, widths: Sequence[int] = ()) -> None:
        super().__init__()
        sizes = [torch.zeros(input.shape).numel(), *widths]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in zip(sizes, widths, strict=False):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.stack, self.feature_dim = nn.Sequential(*layers), sizes[-1]

    def layers(self) -> Sequence[nn.Module]:
        return (self.stack,)


def mlp(input: InputSpec, feature_dim: int = 64, width: int = 64) -> nn.Module:
    """Two linear layers, each with ReLU."""
    return Dense(input, (width, feature_dim))


def identity(input: InputSpec) -> nn.Module:
    """The standardised values as features: nothing is trained but heads."""
    return Dense(input)
