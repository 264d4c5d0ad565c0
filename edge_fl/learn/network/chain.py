"""Networks that are plain chains of layers, and their gradient without autograd.

A step on a small batch is bound by memory and by calls more than by arithmetic: autograd writes every weight's gradient to memory for the
optimiser to read it again, and its graph costs as much as a small layer. Here the backward pass goes layer by layer with the kernels
that autograd itself would call, and the gradient of a linear layer stays in its two factors (`Product`).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F

from edge_fl.learn.network import precision
from edge_fl.learn.optimiser import Gradients, Path, Product

aten = torch.ops.aten
LARGE_BYTES = 1 << 20  # what the second-level cache of a core holds
ONEDNN = (  # measured on x86-64 only; other processors keep torch's own product
    platform.machine() == "x86_64"
    and torch.backends.mkldnn.is_available()
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)


class Row(nn.Module):
    """A module that applies what `row` lists, one after the other, and does nothing else."""

    def row(self) -> Sequence[Callable[[Tensor], Tensor]]:
        """Modules, or functions of a tensor that have nothing to train."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.row():
            x = layer(x)
        return x


class Layer(NamedTuple):
    """One layer of a chain; `tensors` are the names of its weight and bias in the part, as far as it has them."""

    layer: Callable[[Tensor], Tensor]
    tensors: tuple[str, ...]


class Bound(NamedTuple):
    """A link with its tensors at hand; `paths` says where these stand among what trains, () for a layer that does not."""

    layer: Any
    tensors: tuple[Tensor, ...]
    paths: tuple[Path, ...]


class Kind(NamedTuple):
    """A kind of layer: which of them are understood, its forward and its backward pass.

    `forward(layer, x, *tensors)` -> (y, what the backward pass needs); `backward(layer, grad, kept, wanted, *tensors)`, with the gradient
    of y -> (the gradient of x, or anything where it is not `wanted`; the gradients of the tensors).
    """

    understood: Callable[[Any], bool]
    forward: Callable[..., tuple[Tensor, Any]]
    backward: Callable[..., tuple[Tensor, Sequence[Tensor | Product]]]


def links(module: nn.Module) -> tuple[Layer, ...] | None:
    """The layers of a chain, first to last; None for a network with any other module, a hook, or a tensor that two layers share."""
    if any(child._forward_hooks or child._forward_pre_hooks for child in module.modules()):
        return None
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    found: list[Layer] = []
    for layer in _flat(module):
        if isinstance(layer, nn.Module):
            if type(layer) not in KINDS or not KINDS[type(layer)].understood(layer):
                return None
            found.append(Layer(layer, tuple(names[id(tensor)] for tensor in layer.parameters())))
        else:
            found.append(Layer(layer, ()))
    tensors = [name for link in found for name in link.tensors]
    return tuple(found) if len(set(tensors)) == len(tensors) else None


def gradient(chain: Sequence[Bound], x: Tensor, error: Callable[[Tensor], Tensor]) -> Gradients | None:
    """d loss / d every tensor that trains, where `error` gives d loss / d output [B, C] for the output of the chain, both float32.

    None where nothing trains, or where a function stands behind the first layer that does, because its gradient is not known.
    """
    first = next((place for place, link in enumerate(chain) if link.paths), len(chain))
    if first == len(chain) or any(type(link.layer) not in KINDS for link in chain[first:]):
        return None
    dtype = precision.current()
    kept: list[Any] = []
    rounded: list[tuple[Tensor, ...]] = []
    for layer, tensors, _ in chain:
        if dtype is not None and tensors:
            x, tensors = x.to(dtype), tuple(t.to(dtype) for t in tensors)
        x, held = KINDS[type(layer)].forward(layer, x, *tensors) if type(layer) in KINDS else (layer(x), None)
        kept.append(held)
        rounded.append(tensors)
    found: dict[Path, Tensor | Product] = {}
    grad = error(x.float()).to(x.dtype)
    for place in range(len(chain) - 1, first - 1, -1):
        layer, _, paths = chain[place]
        backward = KINDS[type(layer)].backward
        grad, own = backward(layer, grad, kept[place], place > first, *rounded[place])
        found |= zip(paths, own if dtype is None else [_widened(each) for each in own], strict=False)
    return found


def _flat(module: Callable[[Tensor], Tensor]) -> list[Callable[[Tensor], Tensor]]:
    if isinstance(module, Row) and type(module).forward is Row.forward:
        inner: Sequence[Any] = module.row()
    elif type(module) is nn.Sequential:
        inner = list(module)
    else:
        return [] if type(module) is nn.Identity else [module]
    return [layer for part in inner for layer in _flat(part)]


def _widened(grad: Tensor | Product) -> Tensor | Product:
    """In float32, as parameters are."""
    if isinstance(grad, Product):
        return Product(grad.left.float(), grad.right.float())
    return grad.float()


def _linear_backward(
    layer: nn.Linear, grad: Tensor, x: Tensor, wanted: bool, weight: Tensor, *bias: Tensor
) -> Any:
    return _product(grad, weight.T) if wanted else grad, (Product(grad, x), grad.sum(0))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias. For a batch's few rows and weights beyond the cache torch's own product takes twice as long as oneDNN's."""
    plain = x.dtype != torch.float32 or x.device.type != "cpu" or is_functorch_wrapped_tensor(x)
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


def _pool_backward(layer: nn.MaxPool2d, grad: Tensor, kept: tuple[Tensor, Tensor], wanted: bool) -> Any:
    x, places = kept
    return aten.max_pool2d_with_indices_backward(grad, x, *_window(layer), places), ()


def _window(layer: nn.MaxPool2d) -> tuple[Any, ...]:
    sides = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return (*([side, side] if isinstance(side, int) else side for side in sides), layer.ceil_mode)


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
        lambda layer, x: (x.flatten(1), x.shape),
        lambda layer, grad, shape, wanted: (grad.reshape(shape), ()),
    ),
}
