"""Networks used only by the benchmark: pixels as features, or one hidden layer."""

from __future__ import annotations

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
