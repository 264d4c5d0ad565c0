"""FedRIR's personal networks: specific extractor, decoder, estimator of mutual information, and a head on both features.

With the model `cnn2-bn` they have the sizes of the official code; for any other extractor they are derived from its size.
"""

from math import ceil

import torch
from torch import Tensor, nn

from edge_fl.inputs import InputSpec
from edge_fl.learn.network.part import Net
from edge_fl.learn.tree import Parts

HIDDEN = 128  # width inside the estimator


def specific_extractor(net: Net, method: object = None) -> nn.Module:
    """The shared extractor's architecture with 2d outputs: mean and log-variance of the client-specific feature."""
    module = net.parts["extractor"].build()
    leaves = [
        name
        for name, child in module.named_modules()
        if not [*child.children()] and not isinstance(child, nn.Identity)
    ]
    last = module.get_submodule(leaves[-1])
    if not isinstance(last, nn.Linear):
        return nn.Sequential(module, nn.Linear(net.feature_dim, 2 * net.feature_dim))
    module.set_submodule(leaves[-1], nn.Linear(last.in_features, 2 * net.feature_dim))
    return module


def decoder(net: Net, method: object = None) -> nn.Module:
    """Features [N, d] -> normalised images [N, C, H, W]."""
    return Decoder(net.feature_dim, net.input)


def estimator(net: Net, method: object = None) -> nn.Module:
    """Features [N, d] -> mean and log-variance [N, 2d] of a Gaussian over the other feature."""
    return Estimator(
        net.feature_dim, nn.ReLU() if getattr(method, "id_variance", "") == "relu" else nn.Tanh()
    )


def joint_head(net: Net, method: object = None) -> nn.Module:
    """Both features concatenated [N, 2d] -> logits [N, C]."""
    return nn.Linear(2 * net.feature_dim, net.classes)


def specific_feature(net: Net, parts: Parts, x: Tensor) -> Tensor:
    """f_cs [N, d]: the mean that the specific extractor gives for whole images."""
    return halves(net.specific_extractor.frozen(parts["specific_extractor"], x))[0]


def halves(gaussian: Tensor) -> tuple[Tensor, Tensor]:
    """[N, 2d] -> mean and log-variance, [N, d] each."""
    mean, log_variance = gaussian.chunk(2, dim=1)
    return mean, log_variance


class Decoder(nn.Module):
    """Linear to 64 small planes, then two transposed convolutions 5x5 of stride 2; sides that are not 4s + 12 are cropped."""

    def __init__(self, dim: int, input: InputSpec) -> None:
        super().__init__()
        self.height, self.width = input.height, input.width
        rows, columns = (max(1, ceil((side - 12) / 4)) for side in (input.height, input.width))
        self.linear = nn.Linear(dim, 64 * rows * columns)
        self.planes = nn.Unflatten(1, (64, rows, columns))
        self.first = nn.ConvTranspose2d(64, 32, 5, stride=2, output_padding=1)
        self.second = nn.ConvTranspose2d(32, input.channels, 5, stride=2, output_padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.second(torch.relu(self.first(self.planes(self.linear(z)))))
        cropped: Tensor = x[:, :, : self.height, : self.width]
        return cropped


class Estimator(nn.Module):
    """Two networks d -> 128 -> d; the log-variance ends in `last` (tanh limits it to -1..1)."""

    def __init__(self, dim: int, last: nn.Module) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, dim))
        self.log_variance = nn.Sequential(nn.Linear(dim, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, dim), last)

    def forward(self, z: Tensor) -> Tensor:
        return torch.cat([self.mean(z), self.log_variance(z)], dim=1)
