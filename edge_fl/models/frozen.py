"""Frozen networks, whose tensors are neither trained, averaged nor sent, also with adapters, which are.

Low-rank adapters (LoRA, Hu et al., arXiv:2106.09685) come from peft: every linear layer and every pointwise convolution W gets W + B A with
A of `rank` rows. A is random, B zero, so that training starts from the frozen network.
"""

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from edge_fl.errors import MethodError
from edge_fl.learn.network.part import Net, Part
from edge_fl.learn.tree import BUFFER, Params, Parts

ADAPTER = "lora_"  # in the name of an adapter's tensors


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


class Adapted(Frozen):
    """A frozen network with trainable adapters."""

    def __init__(self, network: nn.Module, name: str, rank: int) -> None:
        targets = [key for key, module in network.named_modules() if _is_target(module)]
        if not targets:
            raise MethodError(
                f"model {name}: no linear layer or pointwise convolution for adapters; expected another train"
            )
        adapters = _injected(network.requires_grad_(False), targets, name, rank)
        super().__init__(adapters, lambda key: ADAPTER in key)

    def merge(self) -> None:
        """Add the adapters to the weights of their layers and remove them."""
        for key, module in [*self.network.named_modules()]:
            if hasattr(module, "base_layer"):
                layer = module.base_layer
                layer.weight = layer.weight + module.get_delta_weight("default")
                parent, _, last = key.rpartition(".")
                setattr(self.network.get_submodule(parent), last, layer)


def merged(net: Net, parts: Parts) -> tuple[Net, Parts]:
    """The net with every adapter of `parts` merged into its weights, and the parts without adapters."""
    for name, params in parts.items():
        if name in net.parts and any(f".{ADAPTER}" in key for key in params):
            part = _merged(net.parts[name], params)
            net = Net(net.input, net.classes, net.feature_dim, net.seed, {**net.parts, name: part}, net.added)
            parts = {**parts, name: part.init()}
    return net, parts


def _merged(part: Part, params: Params) -> Part:
    def build() -> nn.Module:
        module = part.build().requires_grad_(False)
        own = dict(module.named_parameters()) | {
            BUFFER + key: buffer for key, buffer in module.named_buffers()
        }
        for key, tensor in params.items():
            own[key].copy_(tensor)
        for child in [*module.modules()]:
            if isinstance(child, Adapted):
                child.merge()
        return module

    return Part(part.name, build, 0)


def _is_target(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        return module.kernel_size == (1, 1) and module.groups == 1
    return type(module) is nn.Linear


def _injected(network: nn.Module, targets: list[str], name: str, rank: int) -> nn.Module:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise MethodError(
            f"model {name}, train = \"lora\": needs pip install 'edge-fl[lora]' ({error.name} is not installed)"
        ) from error
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted: Any = inject_adapter_in_model(config, network)
    return adapted  # type: ignore[no-any-return]
