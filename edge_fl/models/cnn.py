"""Convolutional networks of the papers: FedCRC's four convolutions, two convolutions of FedCRL and PFLlib, FedRIR's with BatchNorm.

`tiny` is for tests and small devices: two padded convolutions for images from 4x4 pixels.
"""

from collections.abc import Sequence

import torch
from torch import nn

from edge_fl.inputs import InputSpec
from edge_fl.learn.network.chain import Chain


class Features(Chain):
    """Convolutions, flatten, and (with `width`) a linear layer without activation to `width` features."""

    def __init__(
        self, convolutions: nn.Module, shape: Sequence[int], width: int = 0, *, activation: bool = False
    ) -> None:
        super().__init__()
        self.convolutions = convolutions
        with torch.no_grad():
            flat = convolutions.eval()(torch.zeros(1, *shape)).numel()
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(flat, width) if width else nn.Identity()
        self.activation = nn.ReLU() if activation else nn.Identity()
        self.feature_dim = width or flat

    def layers(self) -> Sequence[nn.Module]:
        return self.convolutions, self.flatten, self.linear, self.activation


def block(inputs: int, outputs: int, kernel: int, *, padding: int = 0, norm: bool) -> list[nn.Module]:
    """Pool before ReLU: the same function and gradient as ReLU before pool, with a quarter of the ReLU's work."""
    norms: list[nn.Module] = [nn.BatchNorm2d(outputs)] if norm else []
    return [nn.Conv2d(inputs, outputs, kernel, padding=padding), *norms, nn.MaxPool2d(2), nn.ReLU()]


def tiny(input: InputSpec, feature_dim: int = 64, width: int = 16, norm: bool = True) -> nn.Module:
    """Conv3x3 -> BN -> ReLU -> pool, twice (width, 2 * width), then a linear layer; from 4x4 pixels up."""
    first = block(input.channels, width, 3, padding=1, norm=norm)
    return Features(
        nn.Sequential(*first, *block(width, 2 * width, 3, padding=1, norm=norm)), input.shape, feature_dim
    )


def cnn2(input: InputSpec, feature_dim: int = 512, activation: bool = True, padding: int = 0) -> nn.Module:
    """Conv5x5,32 -> ReLU -> pool, Conv5x5,64 -> ReLU -> pool, linear [-> ReLU] (PFLlib's FedAvgCNN).

    FedCRL uses feature_dim 128 and no activation (docs/methods-formulas.md, "Networks").
    """
    blocks = [
        *block(input.channels, 32, 5, padding=padding, norm=False),
        *block(32, 64, 5, padding=padding, norm=False),
    ]
    return Features(nn.Sequential(*blocks), input.shape, feature_dim, activation=activation)


def cnn2_bn(input: InputSpec, feature_dim: int = 512, padding: int = 0) -> nn.Module:
    """FedRIR's extractor: Conv5x5,32 -> BN -> ReLU -> pool, Conv5x5,64 -> BN -> ReLU -> pool, linear."""
    blocks = [
        *block(input.channels, 32, 5, padding=padding, norm=True),
        *block(32, 64, 5, padding=padding, norm=True),
    ]
    return Features(nn.Sequential(*blocks), input.shape, feature_dim)


def cnn4(input: InputSpec, width: int = 64) -> nn.Module:
    """FedCRC's four convolutions 3x3 with BatchNorm and pooling, flattened; for images from 16x16 pixels."""
    blocks = block(input.channels, width, 3, padding=1, norm=True)
    for _ in range(3):
        blocks += block(width, width, 3, padding=1, norm=True)
    return Features(nn.Sequential(*blocks), input.shape)
