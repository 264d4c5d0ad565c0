"""Frozen networks: their tensors are neither trained, averaged nor sent."""

from collections.abc import Callable

from torch import Tensor, nn


class Frozen(nn.Module):
    """A network whose tensors are non-persistent buffers, so that its part has no parameters; always with inference behaviour.

    `trained` selects parameters by name that stay parameters.
    """

    def __init__(self, network: nn.Module, trained: Callable[[str], bool] = lambda name: False) -> None:
        super().__init__()
        self.network = constant(network, trained).eval()
        self.feature_dim = network.feature_dim

    def train(self, mode: bool = True) -> "Frozen":
        """Keep inference behaviour: BatchNorm uses the statistics of the weights."""
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)  # type: ignore[no-any-return]


def constant(network: nn.Module, trained: Callable[[str], bool]) -> nn.Module:
    """Turn the parameters and buffers of a network that are not `trained` into non-persistent buffers; returns the network."""
    for path, module in network.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if not trained(f"{path}.{name}"):
                module._parameters.pop(name, None)
                module.register_buffer(name, tensor.detach(), persistent=False)
    return network
