"""Frozen networks: their tensors are neither trained, averaged nor sent."""

from __future__ import annotations

from torch import Tensor, nn


class Frozen(nn.Module):
    """A network whose tensors are non-persistent buffers, so that its part has no parameters; always with inference behaviour."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = constant(network).eval()
        self.feature_dim = network.feature_dim

    def train(self, mode: bool = True) -> Frozen:
        """Keep inference behaviour: BatchNorm uses the statistics of the weights."""
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)  # type: ignore[no-any-return]


def constant(network: nn.Module) -> nn.Module:
    """Turn every parameter and buffer of a network into a non-persistent buffer; returns the network."""
    for module in network.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            module._parameters.pop(name, None)
            module.register_buffer(name, tensor.detach(), persistent=False)
    return network
