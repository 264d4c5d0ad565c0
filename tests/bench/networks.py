"""The networks of the bench that are no paper's: pixels as features, or one hidden layer on them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from edge_fl.config import InputSpec
from edge_fl.learn.network.chain import Chain


class Pixels(Chain):
    """The pixels themselves as features, or with `hidden` one layer of so many units on them."""

    def __init__(self, input: InputSpec, hidden: int = 0) -> None:
        super().__init__()
        pixels = input.channels * input.height * input.width
        self.flatten = nn.Flatten()
        self.layer = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU()) if hidden else nn.Identity()
        self.feature_dim = hidden or pixels

    def layers(self) -> Sequence[nn.Module]:
        return self.flatten, self.layer
