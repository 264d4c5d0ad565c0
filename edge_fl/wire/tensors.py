"""Tensor files: parts as one safetensors file, read within limits and without executing anything.

A tensor is named ``PART:TENSOR``, separated at the first ``:``. An empty part is written as an empty tensor without a name of its own.
Equal parts give bit-identical files. Reading trusts nothing: the result is complete or a ProtocolError, and consists of views of the
payload.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from safetensors.numpy import save

from edge_fl.errors import ProtocolError, brief
from edge_fl.untrusted import converted
from edge_fl.wire.messages import unique_keys

Array = NDArray[Any]
Arrays = Mapping[str, Mapping[str, Array]]
Signature = dict[str, tuple[str, tuple[int, ...]]]

PART = re.compile(r"[a-z_][a-z0-9_.]{0,63}\Z")
TENSOR = re.compile(r"[^\x00-\x1f\x7f]{1,255}\Z")
SEPARATOR = ":"
HEADER_BYTES = 8  # length of the header length, an unsigned little-endian integer
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
EMPTY_PART = np.zeros(0, np.uint8)


@dataclass(frozen=True)
class TensorLimits:
    """TensorLimits of a tensor file; `max_elements` applies to one tensor, with a dimension of 0 counted as 1."""

    max_bytes: int = 512 * 1024 * 1024
    max_header_bytes: int = 1024 * 1024
    max_tensors: int = 4096
    max_rank: int = 8
    max_elements: int = 128 * 1024 * 1024


LIMITS = TensorLimits()


class TensorEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor in the header: `data_offsets` are [begin, end) after the header."""

    dtype: Literal["F32", "F16", "I64", "I32", "I8", "U8", "BOOL"]
    shape: list[Annotated[int, Meta(ge=0)]]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


def pack(parts: Arrays, limits: TensorLimits = LIMITS) -> bytes:
    """Encode parts as one safetensors file. Raises ProtocolError for a name, dtype or size that `unpack` would reject."""
    tensors: dict[str, Array] = {}
    for name, (part, tensor, array) in _flatten(parts).items():
        if not PART.match(part) or (tensor and not TENSOR.match(tensor)):
            raise ProtocolError(
                f"tensor {name!r}: expected PART:TENSOR with PART of a-z, 0-9, '_' and '.'",
                consequence="nothing was sent",
            )
        if (dtype := array.dtype.newbyteorder("<")) not in DTYPES.values():
            raise ProtocolError(
                f"tensor {name!r}: dtype {array.dtype}, expected one of {', '.join(map(str, DTYPES.values()))}",
                consequence="nothing was sent",
            )
        _check_shape(name, array.shape, limits)
        tensors[name] = np.asarray(array, dtype=dtype, order="C")
    if len(tensors) > limits.max_tensors:
        raise ProtocolError(
            f"{len(tensors)} tensors, at most {limits.max_tensors}", consequence="nothing was sent"
        )
    payload: bytes = save(tensors)
    if len(payload) > limits.max_bytes:
        raise ProtocolError(
            f"tensors of {len(payload)} bytes, at most {limits.max_bytes}", consequence="nothing was sent"
        )
    return payload


def unpack(payload: bytes | memoryview, limits: TensorLimits = LIMITS) -> dict[str, dict[str, Array]]:
    """Decode parts as read-only views of `payload`. Raises only ProtocolError, whatever the bytes."""
    if len(payload) > limits.max_bytes:
        raise ProtocolError(f"tensors of {len(payload)} bytes, at most {limits.max_bytes}")
    header, data = _split(memoryview(payload), limits)
    parts: dict[str, dict[str, Array]] = {}
    begin = 0
    for name, entry in sorted(_entries(header, limits).items(), key=lambda item: item[1].data_offsets):
        if entry.data_offsets[0] != begin:
            raise ProtocolError(f"tensor {name!r}: begins at byte {entry.data_offsets[0]}, expected {begin}")
        begin = entry.data_offsets[1]
        part, _, tensor = name.partition(SEPARATOR)
        arrays = parts.setdefault(part, {})
        if tensor:
            arrays[tensor] = _view(name, entry, data, limits)
        elif begin != entry.data_offsets[0]:
            raise ProtocolError(f"tensor {name!r}: has data but no name of its own")
    if begin != len(data):
        raise ProtocolError(f"tensors: {len(data)} bytes of data, the header describes {begin}")
    return parts


def require_finite(parts: Arrays) -> None:
    """Raise ProtocolError that names the first tensor with NaN or infinity."""
    for name, (_, _, array) in _flatten(parts).items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ProtocolError(f"tensor {name!r}: has NaN or infinity, expected finite numbers")


def signature(parts: Arrays) -> Signature:
    """``{"PART:TENSOR": (dtype, shape)}``: parts with equal signatures can be averaged."""
    return {name: (array.dtype.name, array.shape) for name, (_, _, array) in _flatten(parts).items()}


def check_like(parts: Arrays, expected: Signature) -> None:
    """Raise ProtocolError that names the first tensor, by name, that is missing, unexpected, or of another dtype or shape."""
    found = signature(parts)
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise ProtocolError(
                f"tensor {name!r}: {_kind(found.get(name))}, expected {_kind(expected.get(name))}"
            )


def _flatten(parts: Arrays) -> dict[str, tuple[str, str, Array]]:
    """Full name -> (part, tensor, array), sorted by name; an empty part becomes one empty tensor."""
    named = {
        f"{part}{SEPARATOR}{tensor}": (part, tensor, array)
        for part, tensors in parts.items()
        for tensor, array in (tensors or {"": EMPTY_PART}).items()
    }
    return dict(sorted(named.items()))


def _split(payload: memoryview, limits: TensorLimits) -> tuple[memoryview, memoryview]:
    """Split into (header, data)."""
    if len(payload) < HEADER_BYTES:
        raise ProtocolError(f"tensors: {len(payload)} bytes, expected a safetensors file")
    length = int.from_bytes(payload[:HEADER_BYTES], "little")
    rest = payload[HEADER_BYTES:]
    if length > min(len(rest), limits.max_header_bytes) or bytes(rest[:1]) != b"{":
        raise ProtocolError(
            f"tensors: starts with {bytes(payload[:HEADER_BYTES]).hex()}, not a safetensors file"
        )
    return rest[:length], rest[length:]


def _entries(header: memoryview, limits: TensorLimits) -> dict[str, TensorEntry]:
    try:
        tree = json.loads(bytes(header), object_pairs_hook=unique_keys)
        entries = converted(tree, dict[str, TensorEntry])
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ProtocolError(f"tensors: header: {brief(error)}") from error
    if len(entries) > limits.max_tensors:
        raise ProtocolError(f"tensors: {len(entries)} tensors, at most {limits.max_tensors}")
    for name in entries:
        part, separator, tensor = name.partition(SEPARATOR)
        if not separator or not PART.match(part) or (tensor and not TENSOR.match(tensor)):
            raise ProtocolError(f"tensor {name[:80]!r}: expected PART:TENSOR")
    return entries


def _view(name: str, entry: TensorEntry, data: memoryview, limits: TensorLimits) -> Array:
    dtype, (begin, end) = DTYPES[entry.dtype], entry.data_offsets
    _check_shape(name, entry.shape, limits)
    count = math.prod(entry.shape)
    if end > len(data) or end - begin != count * dtype.itemsize:
        raise ProtocolError(
            f"tensor {name!r}: bytes {begin} to {end} of {len(data)}, expected {count * dtype.itemsize} for its shape"
        )
    raw = data[begin:end]
    if entry.dtype == "BOOL" and (np.frombuffer(raw, np.uint8) > 1).any():
        raise ProtocolError(f"tensor {name!r}: a bool that is neither 0 nor 1")
    return np.frombuffer(raw, dtype).reshape(entry.shape)


def _check_shape(name: str, shape: tuple[int, ...] | list[int], limits: TensorLimits) -> None:
    if len(shape) > limits.max_rank or math.prod(max(size, 1) for size in shape) > limits.max_elements:
        raise ProtocolError(
            f"tensor {name!r}: shape {list(shape)[:16]}, at most {limits.max_rank} dimensions"
            f" and {limits.max_elements} elements"
        )


def _kind(entry: tuple[str, tuple[int, ...]] | None) -> str:
    return f"{entry[0]} {list(entry[1])}" if entry else "nothing"
