"""BatchNorm that ignores padding: inside `padding(mask)`, batch statistics are computed over samples only.

Only the vectorised engine pads; without a mask torch's own BatchNorm runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from edge_fl.learn.network import precision

_mask: ContextVar[Tensor | None] = ContextVar("padding", default=None)


@contextmanager
def padding(mask: Tensor | None) -> Iterator[None]:
    """Set the mask [B] of samples (1) and padding (0) for BatchNorm; None: no padding. Repeated for several views of a batch."""
    token = _mask.set(mask)
    try:
        yield
    finally:
        _mask.reset(token)


def respect_padding(module: nn.Module) -> nn.Module:
    """Make every BatchNorm in a module use the mask; returns the module."""
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            child.forward = MethodType(_forward, child)  # type: ignore[method-assign]
    return module


def _forward(self: nn.modules.batchnorm._BatchNorm, x: Tensor) -> Tensor:
    mask = _mask.get()
    if precision.current() and is_functorch_wrapped_tensor(x):
        # BatchNorm under autocast has no vmap rule
        x = x.float()
    if mask is None or not self.training:
        return type(self).forward(self, x)
    weight = mask.repeat(len(x) // len(mask)).reshape(-1, *[1] * (x.dim() - 1))
    dims = [d for d in range(x.dim()) if d != 1]
    count = (weight.sum() * (x[0, 0].numel())).clamp(min=2)
    mean = (x * weight).sum(dims) / count
    shape = [1, -1, *[1] * (x.dim() - 2)]
    centred = x - mean.reshape(shape)
    variance = (centred**2 * weight).sum(dims) / count
    _track(self, mean.detach(), variance.detach() * count / (count - 1))
    scaled = centred * torch.rsqrt(variance + self.eps).reshape(shape)
    return scaled if self.weight is None else scaled * self.weight.reshape(shape) + self.bias.reshape(shape)


def _track(self: nn.modules.batchnorm._BatchNorm, mean: Tensor, variance: Tensor) -> None:
    if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
        return
    self.num_batches_tracked.add_(1)
    momentum = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.to(mean.dtype)
    self.running_mean.mul_(1 - momentum).add_(momentum * mean)
    self.running_var.mul_(1 - momentum).add_(momentum * variance)
