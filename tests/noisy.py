"""A user's model that draws from torch's global generator in many ways, with BatchNorm, and in inference, too."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_fl.inputs import InputSpec


class Blur(nn.Module):
    """A layer of the user's own: noise on its input, in training and in inference."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)


class Noisy(nn.Module):
    """Pictures of any size -> 8 features."""

    def __init__(self, input: InputSpec) -> None:
        super().__init__()
        self.feature_dim = 8
        self.blur, self.dropout = Blur(), nn.Dropout(0.3)
        self.convolution, self.norm = nn.Conv2d(input.channels, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.convolution(self.blur(x))).relu())
        if self.training and torch.rand(()) < 0.5:  # stochastic depth
            x = functional.dropout(x, 0.2)
        found: Tensor = self.head(functional.adaptive_avg_pool2d(x, 2).flatten(1))
        return found


class Dropping(nn.Module):
    """The same with nothing but layers of torch, as most users write it."""

    def __init__(self, input: InputSpec) -> None:
        super().__init__()
        self.feature_dim = 8
        self.body = nn.Sequential(
            nn.Conv2d(input.channels, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(16, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found
