"""Trees of tensors: `Params` (one part), `Parts` (many), and the few operations on them. Matching is by name, never by order.

Inside a part, a name says what a tensor is: parameters keep their torch name (``conv1.weight``), buffers carry the prefix
``buffer:`` (``buffer:bn1.running_mean``). So everything that treats the two differently - fitting, proximal terms, means - can
tell them apart without the network at hand, on a device as well as on the server.
"""

from __future__ import annotations

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
    """`fn` over corresponding leaves of trees of dicts, tuples and tensors; other leaves (None, numbers) are kept as they are."""
    result: Any = tree
    if isinstance(tree, Tensor):
        result = fn(tree, *others)
    elif isinstance(tree, dict):
        result = {key: map(fn, item, *[other[key] for other in others]) for key, item in tree.items()}
    elif isinstance(tree, tuple):
        result = tuple(map(fn, item, *rest) for item, *rest in zip(tree, *others, strict=True))
    return result  # type: ignore[no-any-return]


def clone(tree: T) -> T:
    """A copy that shares no memory and no gradient history."""
    return map(lambda t: t.detach().clone(), tree)


def leaves(tree: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Tensor]:
    """All tensors of a tree of dicts by their path of names."""
    if isinstance(tree, Tensor):
        return {path: tree}
    found: dict[tuple[str, ...], Tensor] = {}
    for key, item in tree.items():
        if isinstance(item, Tensor):
            found[*path, key] = item
        else:
            found |= leaves(item, (*path, key))
    return found


def parameters(tree: Any) -> dict[tuple[str, ...], Tensor]:
    """The trainable leaves: floating point and not a buffer."""
    return {p: t for p, t in leaves(tree).items() if not p[-1].startswith(BUFFER) and t.is_floating_point()}


def buffers(params: Params) -> Params:
    """The buffers of one part."""
    return {name: t for name, t in params.items() if name.startswith(BUFFER)}


def has_buffers(tree: Any) -> bool:
    """Whether any leaf is a buffer, that is, whether the part keeps running statistics."""
    return any(path[-1].startswith(BUFFER) for path in leaves(tree))


def replaced(tree: T, values: Mapping[tuple[str, ...], Tensor], path: tuple[str, ...] = ()) -> T:
    """The tree with some leaves exchanged; the dicts are new, the other leaves are shared."""
    if isinstance(tree, dict):
        return {key: replaced(item, values, (*path, key)) for key, item in tree.items()}  # type: ignore[return-value]
    return values.get(path, tree)  # type: ignore[return-value]


def merge(*trees: Parts) -> Parts:
    """Parts of several trees as one; within a part, later tensors win by name."""
    merged: Parts = {}
    for tree in trees:
        for name, params in tree.items():
            merged[name] = {**merged.get(name, {}), **params}
    return merged


def split(parts: Parts, names: Mapping[str, frozenset[str]]) -> tuple[Parts, Parts]:
    """(the tensors that `names` lists by part, all others); `merge` is the inverse. A part without tensors is left out."""
    inside = {
        name: {key: t for key, t in params.items() if key in names.get(name, ())}
        for name, params in parts.items()
    }
    outside = {
        name: {key: t for key, t in params.items() if key not in inside[name]}
        for name, params in parts.items()
    }
    return {name: p for name, p in inside.items() if p}, {name: p for name, p in outside.items() if p}


def prefixed(prefix: str, parts: Parts) -> Parts:
    """The parts under longer names, as a client keeps its own version of parts that it also receives."""
    return {prefix + name: params for name, params in parts.items()}


def unprefixed(prefix: str, parts: Parts) -> Parts:
    """The parts whose name starts with `prefix`, without it."""
    return {name.removeprefix(prefix): params for name, params in parts.items() if name.startswith(prefix)}


def where(flag: Tensor, then: T, otherwise: T) -> T:
    """`then` if the scalar `flag` is not 0, else `otherwise`: trees of equal structure, no question asked of the flag's value."""
    return map(lambda a, b: torch.where(flag > 0, a, b), then, otherwise)


def blend(weights: T, one: T, other: T) -> T:
    """weights * one + (1 - weights) * other, element by element: `one` to the bit where the weight is 1."""
    return map(lambda w, a, b: w * a + (1 - w) * b, weights, one, other)


def flat(tree: Any, name: str = "") -> Params:
    """Any tree as one part, each tensor under the names on the way to it; so a client can keep an optimiser's state."""
    if isinstance(tree, Tensor):
        return {name: tree}
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    return {path: t for key, value in items for path, t in flat(value, f"{name}|{_word(key)}").items()}


def shaped(params: Params, like: T, name: str = "") -> T:
    """The inverse of `flat`, for a tree of the same structure as `like`."""
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
    """The inverse of `to_arrays`; without `copy`, tensors share the memory of the arrays, which must be writable."""

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(array) if copy else array)

    return {name: {key: tensor(array) for key, array in params.items()} for name, params in arrays.items()}


def count(tree: Any) -> int:
    """Number of values in the tree."""
    return sum(t.numel() for t in leaves(tree).values())


def size_bytes(tree: Any) -> int:
    """Bytes of the values in the tree."""
    return sum(t.numel() * t.element_size() for t in leaves(tree).values())


def same(a: Any, b: Any) -> bool:
    """Whether two trees have the same names and bit-identical values."""
    la, lb = leaves(a), leaves(b)
    return la.keys() == lb.keys() and all(torch.equal(t, lb[p]) for p, t in la.items())


def first_not_finite(parts: Parts) -> str | None:
    """The name of the first part and tensor that holds NaN or Infinity, or None."""
    for path, tensor in leaves(parts).items():
        if tensor.is_floating_point() and not _finite(tensor):
            return ".".join(path)
    return None


def _finite(tensor: Tensor) -> bool:
    """A sum is finite only if every term is, and takes a fraction of looking at each; one that is not may also have overflowed."""
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())
