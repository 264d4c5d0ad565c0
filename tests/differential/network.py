"""The network of the comparison, as a model of edge-fl; PFLlib gets the same module with the same initial values."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edge_fl.inputs import InputSpec


class TwoConvolutions(nn.Module):
    """Conv3x3 [-> BN] -> ReLU -> pool, twice, then a linear layer to `feature_dim`.

    The BatchNorm layers are named bn1 and bn2, because PFLlib's FedBN finds them by that name. With `smooth` tanh and means in place of
    ReLU and maxima, so that rounding nowhere decides which value has the gradient.
    """

    def __init__(
        self,
        input: InputSpec,
        feature_dim: int = 32,
        width: int = 8,
        norm: bool = False,
        smooth: bool = False,
    ) -> None:
        super().__init__()
        self._activate, self._pool = (torch.tanh, F.avg_pool2d) if smooth else (torch.relu, torch.max_pool2d)
        self.conv1 = nn.Conv2d(input.channels, width, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(width) if norm else nn.Identity()
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(2 * width) if norm else nn.Identity()
        self.linear = nn.Linear(2 * width * (input.height // 4) * (input.width // 4), feature_dim)
        self.feature_dim = feature_dim
        for layer in (self.conv1, self.conv2, self.linear):  # larger than torch's, so that ten steps suffice
            nn.init.kaiming_normal_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self._pool(self._activate(self.bn1(self.conv1(x))), 2)
        x = self._pool(self._activate(self.bn2(self.conv2(x))), 2)
        return self.linear(x.flatten(1))
