"""Mutated tensor files (header, data, dtypes, names, huge shapes, NaN) give complete parts or a ProtocolError."""

import json
import struct
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge_fl.blob import Assembly, describe, split
from edge_fl.errors import ArtefactError, ProtocolError
from edge_fl.wire import tensors
from edge_fl.wire.tensors import DTYPES, HEADER_BYTES
from edge_fl_server.mqtt.updates.validation import Expected, RejectedError, parts_of
from tests.fuzz.mutate import NO_JSON, mutated_text, mutated_trees, to_json

NAMES = st.sampled_from(["extractor", "head", "own_1", "a.b"])
TENSORS = st.sampled_from(["weight", "bias", "0", "bn.count", "ü:x"])
ARRAYS = st.sampled_from(list(DTYPES.values())).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
)
PARTS = st.dictionaries(NAMES, st.dictionaries(TENSORS, ARRAYS, max_size=3), min_size=1, max_size=3)
EXPECTED = Expected(
    {"extractor": {"extractor:weight": ("float32", (2, 2))}}, frozenset({"head"}), frozenset(), 2**20
)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A tensor file with a mutated header, header length, or data."""
    payload = tensors.pack(draw(PARTS))
    length = int.from_bytes(payload[:HEADER_BYTES], "little")
    header: Any = json.loads(payload[HEADER_BYTES : HEADER_BYTES + length])
    data = payload[HEADER_BYTES + length :]
    if draw(st.booleans()):
        header = draw(mutated_trees(header, NO_JSON))
    text = draw(mutated_text(to_json(header)))
    text = text.ljust(draw(st.sampled_from([0, 0, length, length + 8])))
    stated = draw(
        st.sampled_from(
            [len(text)] * 6 + [0, 1, len(text) - 1, len(text) + 1, 2**20 + 1, 2**31, 2**63, 2**64 - 1]
        )
    )
    return struct.pack("<Q", max(stated, 0)) + text + draw(_spoilt_data(data))


@st.composite
def _spoilt_data(draw: st.DrawFn, data: bytes) -> bytes:
    how = draw(st.sampled_from(["whole"] * 4 + ["NaN", "cut", "longer"]))
    match how:
        case "NaN":
            return b"\xff" * len(data)
        case "cut":
            return data[: draw(st.integers(0, len(data)))]
        case "longer":
            return data + bytes(draw(st.integers(1, 64)))
    return data


def filed(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


LONG_WORD = to_json({"head:": {"dtype": "y" * 5000, "shape": [0], "data_offsets": [0, 0]}})


@given(files())
@example(filed(LONG_WORD))  # quoted input is truncated
def test_a_tensor_file_with_mutations_is_rejected_or_gives_complete_parts(payload: bytes) -> None:
    try:
        parts = tensors.unpack(payload)
    except ProtocolError as error:
        assert len(str(error)) < 1500
        return
    again = tensors.unpack(tensors.pack(parts))
    assert tensors.signature(again) == tensors.signature(parts)
    for part, arrays in parts.items():
        for name, array in arrays.items():
            assert array.tobytes() == again[part][name].tobytes()


@given(files())
def test_a_tensor_file_with_mutations_counts_only_if_finite_and_of_the_right_shape(
    payload: bytes,
) -> None:
    try:
        parts = parts_of(payload, EXPECTED)
    except RejectedError as rejection:
        assert rejection.reason in ("tensors", "parts")
        return
    assert parts.keys() <= {"extractor", "head"}
    for params in parts.values():
        for tensor in params.values():
            assert np.isfinite(tensor.numpy().astype("float64")).all()
    assert all(tuple(tensor.shape) == (2, 2) for tensor in parts.get("extractor", {}).values())


@given(st.binary(min_size=1, max_size=5000), st.data())
def test_a_blob_is_joined_of_its_own_chunks_only(payload: bytes, data: st.DataObject) -> None:
    blob = describe(payload, 1024)
    assembly = Assembly(blob)
    chunks = [bytes(chunk) for chunk in split(payload, 1024)]
    indices = st.one_of(st.integers(0, len(chunks) - 1), st.integers(-2, 2**40))
    for index in data.draw(st.lists(indices, max_size=4)):
        right = chunks[index % len(chunks)]
        chunk = data.draw(st.one_of(st.just(right), mutated_text(right), st.binary(max_size=1100)))
        try:
            assembly.add(index, chunk)
        except ArtefactError:
            assert index not in range(len(chunks)) or chunk != chunks[index]
    if not assembly.complete:
        for index in assembly.missing:
            assembly.add(index, chunks[index])
    assert assembly.join() == payload
