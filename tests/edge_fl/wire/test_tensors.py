"""Tensors survive the wire bit for bit, and nothing else does: every other payload is a ProtocolError."""

import io
import json
import pickle
import struct
import zipfile
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge_fl.errors import ProtocolError
from edge_fl.wire.tensors import (
    DTYPES,
    HEADER_BYTES,
    TensorLimits,
    check_like,
    pack,
    require_finite,
    signature,
    unpack,
)

PARTS = {
    "extractor": {"conv.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 4), "bn.count": np.array(7)},
    "global_head": {"weight:0": np.array([[1.5]], np.float16), "mask": np.array([True, False])},
    "prototypes": {},
}

names = st.from_regex(r"[a-z_][a-z0-9_.]{0,8}", fullmatch=True)
tensor_names = st.text(
    st.characters(min_codepoint=32, exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8
)
arrays = st.sampled_from(list(DTYPES.values())).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3))
)
parts = st.dictionaries(names, st.dictionaries(tensor_names, arrays, max_size=3), max_size=3)


def file(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with any header: text as it is, all else as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


@given(parts)
def test_parts_survive_bit_for_bit(original: dict[str, dict[str, np.ndarray]]) -> None:
    read = unpack(pack(original))
    assert read.keys() == original.keys()
    assert signature(read) == signature(original)
    for part, tensors in original.items():
        for name, array in tensors.items():
            assert read[part][name].tobytes() == array.tobytes()  # NaN payloads and the sign of zero as well


@given(parts)
def test_equal_parts_give_equal_bytes_in_any_order(original: dict[str, dict[str, np.ndarray]]) -> None:
    turned = {part: dict(reversed(tensors.items())) for part, tensors in reversed(original.items())}
    assert pack(turned) == pack(original)


def test_the_file_is_what_other_readers_of_safetensors_expect() -> None:
    theirs = safetensors.numpy.load(pack(PARTS))
    assert set(theirs) == set(signature(PARTS))
    np.testing.assert_array_equal(theirs["extractor:conv.weight"], PARTS["extractor"]["conv.weight"])
    ours = unpack(safetensors.numpy.save({"a:b": np.ones((2, 2), np.float32)}))
    np.testing.assert_array_equal(ours["a"]["b"], np.ones((2, 2)))


def test_layout_and_byte_order_do_not_matter() -> None:
    odd = {"a": {"t": np.arange(6, dtype=">f4").reshape(2, 3).T}}
    plain = {"a": {"t": np.arange(6, dtype=np.float32).reshape(2, 3).T.copy()}}
    assert pack(odd) == pack(plain)
    np.testing.assert_array_equal(unpack(pack(odd))["a"]["t"], plain["a"]["t"])


def test_reading_copies_nothing() -> None:
    payload = pack({"a": {"t": np.zeros(1000, np.float32)}})
    array = unpack(payload)["a"]["t"]
    assert not array.flags.owndata
    assert not array.flags.writeable
    assert np.shares_memory(array, np.frombuffer(payload, np.uint8))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"a": {"t": np.zeros(1, np.float64)}}, "dtype float64, expected one of float32"),
        ({"a": {"t": np.zeros(1, np.complex64)}}, "dtype complex64"),
        ({"a": {"t": np.array([None])}}, "dtype object"),
        ({"a": {"t": np.array(["text"])}}, "dtype <U4"),
        ({"a:b": {"t": np.zeros(1, np.float32)}}, "'a:b:t': expected PART:TENSOR"),
        ({"A": {"t": np.zeros(1, np.float32)}}, "'A:t': expected PART:TENSOR"),
        ({"": {}}, "':': expected PART:TENSOR"),
        ({"a": {"new\nline": np.zeros(1, np.float32)}}, "expected PART:TENSOR"),
        ({"a": {"t": np.zeros((1,) * 9, np.float32)}}, "at most 8 dimensions"),
    ],
)
def test_what_cannot_travel_is_not_sent(wrong: Any, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        pack(wrong)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (TensorLimits(max_bytes=100), "at most 100"),
        (TensorLimits(max_tensors=4), "5 tensors, at most 4"),
        (TensorLimits(max_rank=2), "at most 2 dimensions"),
        (TensorLimits(max_elements=23), "and 23 elements"),
    ],
)
def test_limits_hold_on_both_sides(limits: TensorLimits, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        pack(PARTS, limits)
    with pytest.raises(ProtocolError, match=message):
        unpack(pack(PARTS), limits)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        pytest.param({"a:t": entry("F64")}, bytes(8), id="dtype that is not ours"),
        pytest.param({"a:t": entry("BF16", (4,))}, bytes(8), id="bfloat16"),
        pytest.param({"a:t": entry(None)}, bytes(8), id="no dtype"),
        pytest.param({"a:t": entry(shape=(3,))}, bytes(8), id="shape larger than the data"),
        pytest.param({"a:t": entry(shape=(1,))}, bytes(8), id="shape smaller than the data"),
        pytest.param({"a:t": entry(shape=(-1, -2))}, bytes(8), id="negative dimensions"),
        pytest.param({"a:t": entry(shape=(2.0,))}, bytes(8), id="dimension that is no integer"),
        pytest.param({"a:t": entry(shape=(2**62, 4))}, bytes(8), id="product beyond 64 bits"),
        pytest.param({"a:t": entry(shape=(0, 2**62), offsets=(0, 0))}, b"", id="huge beside a zero"),
        pytest.param({"a:t": entry(shape=(1,) * 33)}, bytes(8), id="too many dimensions"),
        pytest.param({"a:t": entry(shape=2)}, bytes(8), id="shape that is no list"),
        pytest.param({"a:t": entry(offsets=(0, 16))}, bytes(8), id="ends behind the data"),
        pytest.param({"a:t": entry(offsets=(8, 0))}, bytes(8), id="ends before it begins"),
        pytest.param({"a:t": entry(offsets=(-8, 0))}, bytes(8), id="begins before the data"),
        pytest.param({"a:t": entry(offsets=(4, 12))}, bytes(12), id="a hole in front"),
        pytest.param({"a:t": entry()}, bytes(9), id="data that belongs to nobody"),
        pytest.param({"a:t": entry(), "a:u": entry()}, bytes(8), id="two tensors in one place"),
        pytest.param({"a:t": entry(offsets=(0,))}, bytes(8), id="half an offset"),
        pytest.param({"a:t": entry(offsets=(0, 8, 8))}, bytes(8), id="three offsets"),
        pytest.param({"a:t": entry(more=1)}, bytes(8), id="a field nobody knows"),
        pytest.param({"a:t": {"dtype": "F32", "shape": [2]}}, bytes(8), id="no offsets"),
        pytest.param({"a:t": None}, bytes(8), id="no entry"),
        pytest.param({"a": entry()}, bytes(8), id="no part"),
        pytest.param({":t": entry()}, bytes(8), id="empty part"),
        pytest.param({"../a:t": entry()}, bytes(8), id="part that is a path"),
        pytest.param({"a:": entry()}, bytes(8), id="data without a name"),
        pytest.param({"a:" + "t" * 300: entry()}, bytes(8), id="endless name"),
        pytest.param({"a:\u0000": entry()}, bytes(8), id="name with a control character"),
        pytest.param({"__metadata__": {"k": "v"}}, b"", id="metadata"),
        pytest.param({"a:t": entry("BOOL", (2,), (0, 2))}, b"\x01\x02", id="a bool of 2"),
        pytest.param(
            b'{"a:t":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a:t":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
            b"",
            id="a key twice",
        ),
        pytest.param(
            b'{"a:t":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
            bytes(8),
            id="a field twice",
        ),
        pytest.param(
            b'{"a:t":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8), id="NaN for a dimension"
        ),
        pytest.param(
            b'{"a:t":{"dtype":"F32","shape":[1e999],"data_offsets":[0,8]}}', bytes(8), id="infinity"
        ),
        pytest.param(
            b'{"a:t":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}',
            bytes(8),
            id="5000 digits",
        ),
        pytest.param(b'{"a:t":' + b"[" * 100_000, bytes(8), id="deep nesting"),
        pytest.param(b'{"a:\xff":{}}', bytes(8), id="not UTF-8"),
        pytest.param(b'["a:t"]', bytes(8), id="a list"),
        pytest.param(b"{", bytes(8), id="half a header"),
        pytest.param(b"", bytes(8), id="no header"),
    ],
)
def test_a_header_that_lies_is_refused(header: Any, data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"; ignored$"):
        unpack(file(header, data))


@pytest.mark.parametrize("length", [0, 1, 7, 2**20 + 1, 2**32, 2**63, 2**64 - 1])
def test_a_header_length_that_lies_is_refused(length: int) -> None:
    payload = pack(PARTS)
    with pytest.raises(ProtocolError):
        unpack(struct.pack("<Q", length) + payload[HEADER_BYTES:])


def test_every_truncation_is_refused() -> None:
    payload = pack(PARTS)
    for length in range(len(payload)):
        with pytest.raises(ProtocolError):
            unpack(payload[:length])


def test_a_pickle_a_zip_and_an_npz_are_refused_by_their_first_bytes() -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("data.pkl", pickle.dumps({"a": 1}))
    array = io.BytesIO()
    np.savez(array, a=np.zeros(3))
    for payload in (
        pickle.dumps({"a": 1}),
        pickle.dumps([0] * 1000, 0),
        archive.getvalue(),
        array.getvalue(),
        b"\x80" * 64,
    ):
        with pytest.raises(ProtocolError, match="not a safetensors file; ignored"):
            unpack(payload)


@given(st.data())
def test_a_valid_file_with_one_thing_changed_is_read_or_refused(data: st.DataObject) -> None:
    """Structures that are right but for one value get far into the reader; random bytes would not."""
    payload = pack(PARTS)
    length = int.from_bytes(payload[:HEADER_BYTES], "little")
    header = json.loads(payload[HEADER_BYTES : HEADER_BYTES + length])
    name = data.draw(st.sampled_from(sorted(header)))
    field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "name"]))
    numbers = st.integers(-(2**65), 2**65) | st.integers(-2, 30)
    value = data.draw(
        st.none()
        | st.text(max_size=4)
        | st.sampled_from(sorted(DTYPES))
        | numbers
        | st.lists(numbers, max_size=4)
        | st.floats()
    )
    if field == "name":
        header[str(value)] = header.pop(name)
    else:
        header[name][field] = value
    changed = file(header, payload[HEADER_BYTES + length :])
    try:
        read = unpack(changed)
    except ProtocolError:
        return
    assert (
        sum(array.nbytes for tensors in read.values() for array in tensors.values())
        == len(payload) - HEADER_BYTES - length
    )


@given(st.binary(max_size=8), st.integers(0, 700))
def test_bytes_overwritten_anywhere_are_read_or_refused(noise: bytes, at: int) -> None:
    payload = bytearray(pack(PARTS))
    at %= len(payload)
    payload[at : at + len(noise)] = noise
    try:
        unpack(bytes(payload))
    except ProtocolError as error:
        assert str(error)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_what_is_not_finite_is_named(bad: float, dtype: Any) -> None:
    require_finite(PARTS)
    with pytest.raises(ProtocolError, match="'b:t': has NaN or infinity"):
        require_finite({**PARTS, "b": {"s": np.zeros(2, dtype), "t": np.array([[0, bad]], dtype)}})


@pytest.mark.parametrize(
    ("part", "tensors", "message"),
    [
        (
            "extractor",
            {"conv.weight": PARTS["extractor"]["conv.weight"]},
            r"'extractor:bn.count': nothing, expected int64 \[\]",
        ),
        ("head", {"weight": np.zeros(3, np.float32)}, r"'head:weight': float32 \[3\], expected nothing"),
        (
            "global_head",
            {"mask": np.array([True, False]), "weight:0": np.zeros((1, 1), np.float32)},
            "expected float16",
        ),
        (
            "global_head",
            {"mask": np.array([True, False, True]), "weight:0": np.zeros((1, 1), np.float16)},
            r"bool \[3\]",
        ),
        (
            "prototypes",
            {"mean": np.zeros((10, 4), np.float32)},
            r"'prototypes:': nothing, expected uint8 \[0\]",
        ),
    ],
)
def test_the_first_difference_from_what_is_expected_is_named(part: str, tensors: Any, message: str) -> None:
    expected = signature(PARTS)
    check_like(unpack(pack(PARTS)), expected)
    with pytest.raises(ProtocolError, match=message):
        check_like({**PARTS, part: tensors}, expected)
