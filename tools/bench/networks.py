"""Networks used only by the benchmark: pixels as features, one hidden layer, and the small network of BlazeFL's benchmark."""

from collections.abc import Sequence

from torch import nn

from edge_fl.inputs import InputSpec
from edge_fl.learn.network.chain import Chain


class Pixels(Chain):
    """Pixels as features, or one layer of `hidden` units."""

    def __init__(self, input: InputSpec, hidden: int = 0) -> None:
        super().__init__()
        pixels = input.channels * input.height * input.width
        self.flatten = nn.Flatten()
        self.layer = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU()) if hidden else nn.Identity()
        self.feature_dim = hidden or pixels

    def layers(self) -> Sequence[nn.Module]:
        return self.flatten, self.layer


class Small(Chain):
    """The network of PyTorch's CIFAR-10 tutorial: two convolutions and two linear layers (62,006 parameters with a head of ten classes)."""

    def __init__(self, input: InputSpec) -> None:
        super().__init__()
        across, down = (((side - 4) // 2 - 4) // 2 for side in (input.width, input.height))
        self.first = nn.Sequential(nn.Conv2d(input.channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2))
        self.second = nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2))
        self.flatten = nn.Flatten()
        self.third = nn.Sequential(nn.Linear(16 * across * down, 120), nn.ReLU())
        self.fourth = nn.Sequential(nn.Linear(120, 84), nn.ReLU())
        self.feature_dim = 84

    def layers(self) -> Sequence[nn.Module]:
        return self.first, self.second, self.flatten, self.third, self.fourth
