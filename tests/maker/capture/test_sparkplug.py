"""Sparkplug payloads are read by the numbers of the specification's fields, which this encoder writes without protobuf's library."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_fl_maker.capture.sparkplug import Metrics

BIRTH, DATA = (
    ["spBv1.0", "plant", "DBIRTH", "press", "wrist"],
    ["spBv1.0", "plant", "DDATA", "press", "wrist"],
)
NAME, ALIAS, TIME, TYPE, HISTORICAL, NULL, INT, LONG, FLOAT, DOUBLE, BOOL, STRING = (
    1,
    2,
    3,
    4,
    5,
    7,
    *range(10, 16),
)


def varint(value: int) -> bytes:
    head, rest = value & 127, value >> 7
    return bytes([head | 128]) + varint(rest) if rest else bytes([head])


def field(number: int, value: int | float | str | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, float):
        size, form = (5, "<f") if number == FLOAT else (1, "<d")
        return varint(number << 3 | size) + struct.pack(form, value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def payload(*metrics: dict[int, int | float | str], time: int = 0) -> bytes:
    encoded = [field(2, b"".join(field(*item) for item in metric.items())) for metric in metrics]
    return (field(1, time) if time else b"") + b"".join(encoded)


def test_values_of_every_type_by_name() -> None:
    metrics = [
        {NAME: "small", TYPE: 1, INT: 2**8 - 3},
        {NAME: "sign extended", TYPE: 2, INT: 2**32 - 3},
        {NAME: "large", TYPE: 4, LONG: 2**64 - 5},
        {NAME: "unsigned", TYPE: 7, LONG: 2**32 - 3},
        {NAME: "float", TYPE: 9, FLOAT: -0.5},
        {NAME: "double", TYPE: 10, DOUBLE: 1e-9},
        {NAME: "switch", TYPE: 11, BOOL: 1},
        {NAME: "text", TYPE: 12, STRING: "12.5"},
        {NAME: "old", TYPE: 9, FLOAT: 1.0, HISTORICAL: 1},
        {NAME: "none", TYPE: 9, NULL: 1},
        {NAME: "rows", TYPE: 16, 17: "a data set"},
    ]
    ((time, found),) = Metrics().read(DATA, payload(*metrics, time=1_700_000_000_500))
    assert time == 1_700_000_000.5 and found == {
        "small": -3,
        "sign extended": -3,
        "large": -5,
        "unsigned": 2**32 - 3,
        "float": -0.5,
        "double": 1e-9,
        "switch": True,
        "text": "12.5",
        "rows": None,
    }


def test_data_name_metrics_by_the_aliases_of_the_births_of_their_node() -> None:
    metrics = Metrics()
    born = payload({NAME: "ax", ALIAS: 0, TYPE: 2, INT: 1}, {NAME: "ay", ALIAS: 1, TYPE: 9, FLOAT: 0.0})
    data = payload({ALIAS: 0, INT: 2**16 - 1, TIME: 2000}, {ALIAS: 1, FLOAT: 2.0, TIME: 1000}, time=3000)
    with pytest.raises(ValueError, match=r"no birth of press names alias 0, 1"):
        list(metrics.read(DATA, data))
    assert list(metrics.read(BIRTH, born)) == [(None, {"ax": 1, "ay": 0.0})]
    assert list(metrics.read(DATA, data)) == [(1.0, {"ay": 2.0}), (2.0, {"ax": -1})]
    with pytest.raises(ValueError, match="birth of node"):
        list(metrics.read(["spBv1.0", "other", "NDATA", "node"], data))
    assert list(metrics.read(["spBv1.0", "plant", "NDEATH", "press"], born)) == []


@given(st.binary(max_size=60))
def test_other_bytes_are_named(content: bytes) -> None:
    try:
        list(Metrics().read(BIRTH, content))
    except ValueError:
        pass
