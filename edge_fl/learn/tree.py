"""Trees of tensors: `Params` (one part) and `Parts` (several), and operations on them. Tensors correspond by name, not by order.

Parameters keep their torch name (``conv1.weight``), buffers have the prefix ``buffer:`` (``buffer:bn1.running_mean``), so that training,
proximal terms and means can distinguish them without the network.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Params = dict[str, Tensor]
Parts = dict[str, Params]
T = TypeVar("T")

BUFFER = "buffer:"


def map(fn: Callable[..., Tensor], tree: T, *others: Any) -> T:
    """Apply `fn` to corresponding tensors of trees of dicts and tuples; other leaves (None, numbers) stay."""
    result: Any = tree
    if isinstance(tree, Tensor):
        result = fn(tree, *others)
    elif isinstance(tree, dict):
        result = {key: map(fn, item, *[other[key] for other in others]) for key, item in tree.items()}
    elif isinstance(tree, tuple):
        result = tuple(map(fn, item, *rest) for item, *rest in zip(tree, *others, strict=True))
    return result  # type: ignore[no-any-return]


def clone(tree: T) -> T:
    """A copy without shared memory and gradient history."""
    return map(lambda t: t.detach().clone(), tree)


def leaves(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Tensor]:
    """All tensors of a tree of dicts by their path of names."""
    if isinstance(tree, Tensor):
        return {path: tree}
    result: dict[tuple[str, ...], Tensor] = {}
    for key, item in tree.items():
        if isinstance(item, Tensor):
            result[*path, key] = item
        else:
            result |= leaves(item, (*path, key))
    return result


def parameters(tree: Any) -> dict[tuple[str, ...], Tensor]:
    """The trainable leaves: floating point and not a buffer."""
    return {p: t for p, t in leaves(tree).items() if not p[-1].startswith(BUFFER) and t.is_floating_point()}


def buffers(params: Params) -> Params:
    """The buffers of one part."""
    return {name: t for name, t in params.items() if name.startswith(BUFFER)}


def has_buffers(tree: Any) -> bool:
    """Whether any leaf is a buffer (running statistics)."""
    return any(path[-1].startswith(BUFFER) for path in leaves(tree))


def replaced(tree: T, values: Mapping[tuple[str, ...], Tensor], path: tuple[str, ...] = ()) -> T:
    """The tree with some leaves replaced; dicts are new, the other leaves are shared."""
    if isinstance(tree, dict):
        return {key: replaced(item, values, (*path, key)) for key, item in tree.items()}  # type: ignore[return-value]
    return values.get(path, tree)  # type: ignore[return-value]


def merge(*trees: Parts) -> Parts:
    """The union of several Parts; for equal names the last tensor is taken."""
    merged: Parts = {}
    for tree in trees:
        for name, params in tree.items():
            merged[name] = {**merged.get(name, {}), **params}
    return merged


def split(parts: Parts, names: Mapping[str, frozenset[str]]) -> tuple[Parts, Parts]:
    """Split by tensor names per part -> (listed tensors, all others). `merge` is the inverse.

    Parts of which nothing is left are left out; a part without tensors, such as a frozen one, is among the others.
    """
    inside = {
        name: {key: t for key, t in params.items() if key in names.get(name, ())}
        for name, params in parts.items()
    }
    outside = {
        name: {key: t for key, t in params.items() if key not in inside[name]}
        for name, params in parts.items()
    }
    return {name: p for name, p in inside.items() if p}, {
        name: p for name, p in outside.items() if p or not parts[name]
    }


def prefixed(prefix: str, parts: Parts) -> Parts:
    """The parts with a prefix before their names."""
    return {prefix + name: params for name, params in parts.items()}


def unprefixed(prefix: str, parts: Parts) -> Parts:
    """The parts whose names start with `prefix`, without it."""
    return {name.removeprefix(prefix): params for name, params in parts.items() if name.startswith(prefix)}


def where(flag: Tensor, then: T, otherwise: T) -> T:
    """`then` if the scalar `flag` is not 0, else `otherwise`: trees of equal structure; runs under vmap."""
    return map(lambda a, b: torch.where(flag > 0, a, b), then, otherwise)


def flat(tree: Any, name: str = "") -> Params:
    """A tree as one part, each tensor named by its path; stores optimiser states in personal parts."""
    if isinstance(tree, Tensor):
        return {name: tree}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    return {path: t for key, value in items for path, t in flat(value, f"{name}|{_word(key)}").items()}


def shaped(params: Params, like: T, name: str = "") -> T:
    """The inverse of `flat`, with the structure of `like`."""
    result: Any = params.get(name)
    if isinstance(like, Mapping):
        result = {key: shaped(params, value, f"{name}|{_word(key)}") for key, value in like.items()}
    elif isinstance(like, tuple):
        result = tuple(shaped(params, value, f"{name}|{number}") for number, value in enumerate(like))
    return result  # type: ignore[no-any-return]


def _word(key: Any) -> str:
    return "|".join(key) if isinstance(key, tuple) else str(key)


def to_device(tree: T, device: torch.device | str) -> T:
    """The tree on another device (itself when it is there already)."""
    return map(lambda t: t.to(device), tree)


def to_arrays(parts: Parts) -> dict[str, dict[str, np.ndarray]]:
    """Parts as NumPy arrays, for `edge_fl.wire.tensors`."""
    return {
        name: {key: t.detach().cpu().numpy() for key, t in params.items()} for name, params in parts.items()
    }


def from_arrays(arrays: Mapping[str, Mapping[str, np.ndarray]], *, copy: bool = True) -> Parts:
    """The inverse of `to_arrays`; without `copy` the tensors share the arrays' memory, which must be writable."""

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array) if copy else array)

    return {name: {key: tensor(array) for key, array in params.items()} for name, params in arrays.items()}


def size_bytes(tree: Any) -> int:
    """Bytes of the values in the tree."""
    return sum(t.numel() * t.element_size() for t in leaves(tree).values())


def same(a: Any, b: Any) -> bool:
    """Whether two trees have the same names and bit-identical values."""
    la, lb = leaves(a), leaves(b)
    return la.keys() == lb.keys() and all(torch.equal(t, lb[p]) for p, t in la.items())


def first_not_finite(parts: Parts) -> str | None:
    """The path of the first tensor with NaN or Infinity, or None."""
    for path, tensor in leaves(parts).items():
        if tensor.is_floating_point() and not _finite(tensor):
            return ".".join(path)
    return None


def _finite(tensor: Tensor) -> bool:
    # A finite sum has only finite terms, and is cheaper than testing each; an infinite one may be an overflow.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
