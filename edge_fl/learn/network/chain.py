"""Gradients without autograd for networks that are plain chains of layers.

A step on a small batch is limited by memory traffic and call overhead: autograd writes every gradient to memory, the optimiser reads it
again, and building the graph costs as much as a small layer. Here the backward pass calls the same kernels layer by layer, and the gradient
of a linear layer's weight stays in its two factors (`Product`). Optional: `objective.CrossEntropy` falls back to autograd.
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F

from edge_fl.learn.network import precision
from edge_fl.learn.optimiser import Gradient, Gradients, LeafPath, Product

aten = torch.ops.aten
LARGE_BYTES = 1 << 20  # size of a core's second-level cache
INTEL = "GenuineIntel" in (Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else "")
ONEDNN = (  # faster than torch's own product on AMD, where MKL uses half the vector width; not measured on other architectures
    platform.machine() == "x86_64"
    and not INTEL
    and torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


class Chain(nn.Module):
    """A module that applies its `layers` one after the other."""

    def layers(self) -> Sequence[Callable[[Tensor], Tensor]]:
        """Modules, or functions without parameters."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers():
            x = layer(x)
        return x


class Layer(NamedTuple):
    """One layer of a chain; `tensors` are the names of its weight and bias in the part, if any."""

    layer: Callable[[Tensor], Tensor]
    tensors: tuple[str, ...]


class BoundLayer(NamedTuple):
    """A layer with its tensors; `paths` are their paths among the trained parameters, () for a frozen layer."""

    layer: Any
    tensors: tuple[Tensor, ...]
    paths: tuple[LeafPath, ...]


class Kind(NamedTuple):
    """Forward and backward pass of a layer type, and which layers of the type are `supported`.

    forward: (layer, x, *tensors) -> (y, saved); backward: (layer, gradient of y, saved, wanted, *tensors) -> (gradient of x, undefined if
    not `wanted`; gradients of the tensors).
    """

    supported: Callable[[Any], bool]
    forward: Callable[..., tuple[Tensor, Any]]
    backward: Callable[..., tuple[Tensor, Sequence[Tensor | Product]]]


def layers_of(module: nn.Module) -> tuple[Layer, ...] | None:
    """The layers of a chain; None for a network with unsupported modules, hooks, or tensors shared between layers."""
    if any(child._forward_hooks or child._forward_pre_hooks for child in module.modules()):
        return None
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    layers: list[Layer] = []
    for layer in _flat(module):
        if isinstance(layer, nn.Module):
            if type(layer) not in KINDS or not KINDS[type(layer)].supported(layer):
                return None
            layers.append(Layer(layer, tuple(names[id(tensor)] for tensor in layer.parameters())))
        else:
            layers.append(Layer(layer, ()))
    tensors = [name for layer in layers for name in layer.tensors]
    return tuple(layers) if len(set(tensors)) == len(tensors) else None


def gradient(
    chain: Sequence[BoundLayer],
    x: Tensor,
    error: Callable[[Tensor], Tensor],
    more: Callable[[Tensor], Tensor] | None = None,
    at: int = 0,
    kinds: Mapping[Any, Kind] | None = None,
) -> tuple[Gradients, Tensor] | None:
    """(d loss / d each trained tensor, input z of layer `at`); `at` after the last layer is the output.

    error: maps the chain's output [B, C] to d loss / d output, both float32.
    more: further loss terms that depend on z, as z -> d terms / dz. kinds: the supported layers, KINDS by default.
    None if nothing is trained, or if a plain function follows the first trained layer, because its gradient is unknown.
    """
    kinds = KINDS if kinds is None else kinds
    first = next((place for place, bound in enumerate(chain) if bound.paths), len(chain))
    if first == len(chain) or any(type(bound.layer) not in kinds for bound in chain[first:]):
        return None
    dtype = precision.current()
    saved: list[Any] = []
    rounded: list[tuple[Tensor, ...]] = []
    z = x
    for place, (layer, tensors, _) in enumerate(chain):
        if place == at:
            z = x
        if dtype is not None and tensors:
            x, tensors = x.to(dtype), tuple(t.to(dtype) for t in tensors)
        x, keep = kinds[type(layer)].forward(layer, x, *tensors) if type(layer) in kinds else (layer(x), None)
        saved.append(keep)
        rounded.append(tensors)
    if at == len(chain):
        z = x
    grads: dict[LeafPath, Gradient] = {}
    grad = error(x.float()).to(x.dtype)
    for place in range(len(chain) - 1, first - 1, -1):
        layer, _, paths = chain[place]
        backward = kinds[type(layer)].backward
        grad, own = backward(layer, grad, saved[place], place > first, *rounded[place])
        if more is not None and place == at and place > first:
            grad = grad + more(z.float()).to(grad.dtype)
        grads |= zip(paths, own if dtype is None else [_widened(each) for each in own], strict=False)
    return grads, z


def _flat(module: Callable[[Tensor], Tensor]) -> list[Callable[[Tensor], Tensor]]:
    if isinstance(module, Chain) and type(module).forward is Chain.forward:
        inner: Sequence[Any] = module.layers()
    elif type(module) is nn.Sequential:
        inner = list(module)
    else:
        return [] if type(module) is nn.Identity else [module]
    return [layer for part in inner for layer in _flat(part)]


def _widened(grad: Tensor | Product) -> Tensor | Product:
    """The gradient in float32, the parameters' type."""
    if isinstance(grad, Product):
        return Product(grad.left.float(), grad.right.float())
    return grad.float()


def _linear_backward(
    layer: nn.Linear, grad: Tensor, x: Tensor, wanted: bool, weight: Tensor, *bias: Tensor
) -> Any:
    return _product(grad, weight.T) if wanted else grad, (Product(grad, x), grad.sum(0))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. For few rows and weights larger than the cache, oneDNN takes half the time of torch's product."""
    stacked = is_functorch_wrapped_tensor(x) or is_functorch_wrapped_tensor(weight)  # vmap has no rule for it
    plain = x.dtype != torch.float32 or x.device.type != "cpu" or stacked
    if plain or not ONEDNN or weight.nbytes < LARGE_BYTES:
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _convolution(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups), x


def _convolution_backward(
    layer: nn.Conv2d, grad: Tensor, x: Tensor, wanted: bool, weight: Tensor, *bias: Tensor
) -> Any:
    way = (layer.stride, layer.padding, layer.dilation, False, (0, 0), layer.groups)
    before, *own = aten.convolution_backward(grad, x, weight, [len(weight)], *way, [wanted, True, True])
    return before, own


def _pool(layer: nn.MaxPool2d, x: Tensor) -> Any:
    y, places = aten.max_pool2d_with_indices(x, *_window(layer))
    return y, (x, places)


def _pool_backward(layer: nn.MaxPool2d, grad: Tensor, saved: tuple[Tensor, Tensor], wanted: bool) -> Any:
    x, places = saved
    return aten.max_pool2d_with_indices_backward(grad, x, *_window(layer), places), ()


def _window(layer: nn.MaxPool2d) -> tuple[Any, ...]:
    sides = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return (*([side, side] if isinstance(side, int) else side for side in sides), layer.ceil_mode)


def _as(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient [B, D] in the shape of images x [B, C, H, W] and in their channel order; the layers before need not convert it."""
    grad = grad.reshape(x.shape)
    if is_functorch_wrapped_tensor(x) or x.dim() != 4:
        return grad
    if x.is_contiguous(memory_format=torch.channels_last):
        return grad.contiguous(memory_format=torch.channels_last)
    return grad


def _relu(layer: nn.ReLU, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.relu()
    return y, y


KINDS: Mapping[Any, Kind] = {
    nn.Linear: Kind(lambda layer: True, lambda layer, x, *own: (_product(x, *own), x), _linear_backward),
    nn.Conv2d: Kind(
        lambda layer: layer.padding_mode == "zeros" and not isinstance(layer.padding, str),
        _convolution,
        _convolution_backward,
    ),
    nn.MaxPool2d: Kind(lambda layer: not layer.return_indices, _pool, _pool_backward),
    nn.ReLU: Kind(
        lambda layer: True,
        _relu,
        lambda layer, grad, y, wanted: (aten.threshold_backward(grad, y, 0), ()),
    ),
    nn.Flatten: Kind(
        lambda layer: (layer.start_dim, layer.end_dim) == (1, -1),
        lambda layer, x: (x.flatten(1), x),
        lambda layer, grad, x, wanted: (_as(grad, x), ()),
    ),
}
