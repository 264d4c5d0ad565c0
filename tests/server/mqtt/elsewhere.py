"""A torch device that is not the CPU, for machines without a GPU: operations that mix its tensors with CPU tensors fail.

Inside `elsewhere()` torch's device `ELSEWHERE` holds values: every operation is carried out on the CPU, after a check that all its
tensors are on one device, as CUDA would have it (a number, that is a tensor without dimensions, may be on the CPU). So code that leaves
a tensor behind fails here as it would fail on a GPU. What a GPU computes differently is not seen.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ELSEWHERE = "meta"  # a device that every torch has, and that has no values of its own
aten = torch.ops.aten
MOVES = (aten._to_copy.default, aten.copy_.default)


class There(Tensor):
    """A tensor on `ELSEWHERE`; `held` is its content."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "There":
        options = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        there = Tensor._make_wrapper_subclass(cls, held.size(), device=ELSEWHERE, **options)
        there.held = held
        return there

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _Dispatch():
            return function(*args, **(kwargs or {}))

    def tolist(self) -> Any:
        return self.held.tolist()


class _Dispatch(TorchDispatchMode):
    """Run operations on the tensors' contents."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [tensor for tensor in tensors if isinstance(tensor, There)]
        if there and function not in MOVES:
            _require_all_there(function, tensors)
        named = kwargs.get("device")
        if named is not None:
            kwargs["device"] = torch.device("cpu")
        result = function(*tree_map(held, args), **tree_map(held, kwargs))
        if function is aten.copy_.default:
            return args[0]
        if function is aten._local_scalar_dense.default:
            return result
        placed = bool(there) if named is None else torch.device(named).type == ELSEWHERE
        return tree_map(lambda leaf: _placed(leaf, there) if placed else leaf, result)


class _Function(TorchFunctionMode):
    """torch.tensor and similar would create a tensor without values on `ELSEWHERE`: create it on the CPU, then move it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.tensor:
            device = kwargs.pop("device", None)
            made = function(*args, **kwargs)
            return made if device is None else made.to(device)
        if function is Tensor.new_tensor:
            like, values = args
            return torch.tensor(values, dtype=like.dtype).to(like.device)
        return function(*args, **kwargs)


@contextmanager
def elsewhere() -> Iterator[None]:
    """Make `ELSEWHERE` a regular device inside the block."""
    with _Function(), _Dispatch():
        yield


def held(leaf: Any) -> Any:
    """The content of a tensor elsewhere; anything else unchanged."""
    return leaf.held if isinstance(leaf, There) else leaf


def _require_all_there(function: Any, tensors: Sequence[Tensor]) -> None:
    left = [tuple(tensor.shape) for tensor in tensors if not isinstance(tensor, There) and tensor.dim()]
    if left:
        raise RuntimeError(f"{function}: tensors of shape {left} are on the CPU, others are not")


def _placed(leaf: Any, there: Sequence[There]) -> Any:
    """A result elsewhere: the output tensor, or a new one."""
    if not isinstance(leaf, Tensor):
        return leaf
    return next((tensor for tensor in there if tensor.held is leaf), There(leaf))
