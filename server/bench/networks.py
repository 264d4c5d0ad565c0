"""The networks of the bench that are no paper's: pixels as features, or one hidden layer on them."""

from __future__ import annotations

from torch import Tensor, nn

from edge_fl.config import InputSpec


class Pixels(nn.Module):
    """The pixels themselves as features, or with `hidden` one layer of so many units on them."""

    def __init__(self, input: InputSpec, hidden: int = 0) -> None:
        super().__init__()
        pixels = input.channels * input.height * input.width
        self.layer = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU()) if hidden else nn.Identity()
        self.feature_dim = hidden or pixels

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))
