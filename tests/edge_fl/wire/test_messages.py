"""Encoded messages decode to the same values; anything else raises ProtocolError only."""

import json
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import example as example_text
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct, inspect

from edge_fl.blob import describe
from edge_fl.errors import ProtocolError
from edge_fl.wire.messages import (
    MAX_JSON_BYTES,
    MAX_JSON_DEPTH,
    MESSAGES,
    Assignment,
    Capability,
    Log,
    Report,
    ServerState,
    decode,
    encode,
)
from tests.fuzz.valid import structs

KINDS = sorted(MESSAGES.values(), key=lambda kind: kind.__name__)
# The JSON kinds of value, one example each that fits no pattern, range or list of names; a float field takes integers as well.
EXAMPLES: dict[str, Any] = {
    "null": None,
    "boolean": True,
    "integer": -(2**50),
    "number": 0.5,
    "string": "\n?",
    "array": [[]],
    "object": {"?": []},
}


def json_kinds(kind: inspect.Type) -> set[str]:
    """Which of EXAMPLES a field of this type would take by their kind, whatever their value."""
    match kind:
        case inspect.NoneType():
            return {"null"}
        case inspect.BoolType():
            return {"boolean"}
        case inspect.FloatType():
            return {"integer", "number"}
        case inspect.StrType() if kind.pattern is None:
            return {"string"}
        case inspect.StructType() if not any(field.required for field in kind.fields):
            return {"object"}
        case inspect.UnionType():
            return set().union(*map(json_kinds, kind.types))
    return set()  # the rest has a range, a pattern, names or items, that no example fits


FIELDS = [
    pytest.param(kind, field, id=f"{kind.__name__}.{field.encode_name}")
    for kind in KINDS
    for field in inspect.type_info(kind).fields  # type: ignore[attr-defined]
]


@cache
def _example(kind: type[Struct]) -> bytes:
    found: list[Struct] = []

    @given(structs(kind))
    def keep(message: Struct) -> None:
        found.append(message)

    keep()
    return msgspec.json.encode(found[-1])


def example(kind: type[Struct]) -> dict[str, Any]:
    """One valid message as the JSON object that it is on the wire, the same each time."""
    tree: dict[str, Any] = json.loads(_example(kind))
    return tree


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_message_survives_the_wire(kind: type[Struct], data: st.DataObject) -> None:
    message = data.draw(structs(kind))
    assert decode(encode(message), kind) == message


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_field_of_the_wrong_type_is_refused(kind: type[Struct], field: inspect.Field) -> None:
    tree = example(kind)
    for name, value in EXAMPLES.items():
        if name in json_kinds(field.type):
            continue
        with pytest.raises(ProtocolError, match=f"^{kind.__name__}: .*ignored$"):
            decode(json.dumps(tree | {field.encode_name: value}).encode(), kind)


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_missing_field_is_refused_or_has_its_default(kind: type[Struct], field: inspect.Field) -> None:
    tree = example(kind)
    del tree[field.encode_name]
    payload = json.dumps(tree).encode()
    if field.required:
        with pytest.raises(ProtocolError, match=f"missing required field `{field.encode_name}`"):
            decode(payload, kind)
    else:
        decode(payload, kind)


def paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, value in (
        tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    ):
        yield from paths(value, (*path, key))


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = tree.copy()
    copy[path[0]] = replaced(tree[path[0]], path[1:], value)
    return copy


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=5),
        st.just("x" * 3000),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_a_valid_structure_with_any_wrong_value_in_it_gives_a_protocol_error_or_a_message(
    kind: type[Struct], data: st.DataObject
) -> None:
    tree = msgspec.to_builtins(data.draw(structs(kind)))
    tree = json.loads(json.dumps(tree))
    path = data.draw(st.sampled_from(list(paths(tree))))
    payload = json.dumps(replaced(tree, path, data.draw(json_values))).encode()
    try:
        message = decode(payload, kind)
    except ProtocolError:
        return
    assert decode(encode(message), kind) == message


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"NaN"', "9" * 400 + ".0", "9" * 5000]
)
@pytest.mark.parametrize("field", ["seconds", "metrics", "samples", "new_in_1_1"])
def test_nan_and_infinity_are_rejected(number: str, field: str) -> None:
    value = f'{{"loss": {number}}}' if field == "metrics" else number
    payload = f'{{"id": "a", "kind": "head", "boot": "b", "samples": 1, "{field}": {value}}}'
    if field == "samples":
        payload = payload.replace('"samples": 1, ', "")
    if field == "new_in_1_1" and number not in ("NaN", "Infinity", "-Infinity"):
        assert decode(payload.encode(), Report).samples == 1  # JSON, in a field that we do not read
    else:
        with pytest.raises(ProtocolError):
            decode(payload.encode(), Report)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_not_sent(value: float) -> None:
    report = Report(id="a", kind="head", boot="b", samples=1, metrics={"loss": value})
    with pytest.raises(
        ProtocolError, match=r"Report\.metrics\.loss: (nan|-?inf), expected a finite number; not sent"
    ):
        encode(report)


def state(extra: bytes = b"") -> bytes:
    return b'{"online": true, "boot": "b"' + extra + b"}"


def test_an_unknown_field_of_a_newer_minor_version_is_ignored() -> None:
    assert decode(state(b', "new_in_1_1": {"a": [1, 2]}'), ServerState) == ServerState(online=True, boot="b")


@pytest.mark.parametrize(
    "extra",
    [
        b', "online": false',
        b', "\\u006fnline": false',
        b', "boot": "b"',
        b', "new": 1, "new": 1',
        b', "new": [{"deep": 1, "deep": 2}]',
    ],
)
def test_a_duplicate_key_is_rejected(extra: bytes) -> None:
    with pytest.raises(ProtocolError, match="duplicate key"):
        decode(state(extra), ServerState)


def nested(depth: int) -> bytes:
    return state(b', "new": ' + b"[" * (depth - 1) + b"]" * (depth - 1))


def test_nesting_is_bounded() -> None:
    decode(nested(MAX_JSON_DEPTH), ServerState)
    with pytest.raises(ProtocolError, match="nested deeper than 8"):
        decode(nested(MAX_JSON_DEPTH + 1), ServerState)


@pytest.mark.parametrize("bracket", [b"[", b'{"a":', b"[]]" * 5 + b"["])
def test_a_tower_of_brackets_is_refused(bracket: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(state(b', "new": ' + bracket * (200_000 // len(bracket))), ServerState)


@example_text("[" * 20)
@example_text('"' + "[" * 20)
@example_text('\\"' + "{" * 20 + "\\")
@given(st.text(alphabet='[]{}"\\a', max_size=40))
def test_brackets_in_a_text_are_no_nesting(text: str) -> None:
    assert decode(encode(Log("info", text)), Log).text == text


@pytest.mark.timeout(60)  # in one pass these take milliseconds; tried again from every quote, minutes
@pytest.mark.parametrize("part", [b'"', b'\\"', b'"\\', b'"a', b'{"a":"', b"\\"])
def test_many_open_strings_do_not_take_long(part: bytes) -> None:
    for head in (b"", b'"', b'{"online": "'):
        with pytest.raises(ProtocolError):
            decode((head + part * MAX_JSON_BYTES)[:MAX_JSON_BYTES], ServerState)


@pytest.mark.timeout(60)
def test_many_keys_with_the_last_one_twice_do_not_take_long() -> None:
    keys = b"".join(b', "%d": 0' % number for number in range(20_000))
    with pytest.raises(ProtocolError, match="duplicate key"):
        decode(state(keys + b', "19999": 0'), ServerState)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[]",
        b"\x80\x04K\x01.",  # a pickle
        b"PK\x03\x04",
        state() + b"x",
        state() + state(),
        b"\xef\xbb\xbf" + state(),
        state().decode().encode("utf-16"),
        state(b', "new": "\xff"'),
        state(b', "new": "\\ud800"'),
        state().replace(b'"b"', b'"b\xc3"'),
        state().replace(b'"b"', b'"b\\n"'),
        state().replace(b'"b"', b'"b' + b"b" * 64 + b'"'),
        state(b', "epoch": ' + b"9" * 5000),
        state(b', "epoch": -1'),
    ],
)
def test_what_is_not_this_message_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^ServerState: (?s:.{1,220}); ignored$"):
        decode(payload, ServerState)


def test_a_long_wrong_value_is_not_quoted_whole() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(b'{"level": "' + b"x" * 100_000 + b'", "text": ""}', Log)
    assert len(str(caught.value)) < 300


def test_too_long_a_payload_is_refused_unread() -> None:
    payload = state(b', "new": "' + b"x" * MAX_JSON_BYTES + b'"')
    with pytest.raises(ProtocolError, match=f"{len(payload)} bytes, at most {MAX_JSON_BYTES}; ignored"):
        decode(payload, ServerState)


def test_too_long_a_message_is_not_sent() -> None:
    capability = Capability("head", "Pi 4", "3.11.2", notes=["x" * 2000] * 200)
    with pytest.raises(ProtocolError, match=f"at most {MAX_JSON_BYTES}; not sent"):
        encode(capability)


def test_the_chunk_list_of_a_want_must_fit_its_length() -> None:
    tree = example(Assignment) | {"down": msgspec.to_builtins(describe(b"parts")) | {"chunks": []}}
    with pytest.raises(ProtocolError, match=r"5 bytes in 0 chunks, expected 1 - at `\$\.down`"):
        decode(json.dumps(tree).encode(), Assignment)


def collections_of(kind: inspect.Type, where: str) -> Iterator[tuple[str, int | None]]:
    """Every list and map in a type, with its largest length."""
    match kind:
        case inspect.StructType():
            for field in kind.fields:
                yield from collections_of(field.type, f"{where}.{field.encode_name}")
        case inspect.UnionType():
            for one in kind.types:
                yield from collections_of(one, where)
        case inspect.TupleType():
            for one in kind.item_types:
                yield from collections_of(one, where)
        case inspect.ListType() | inspect.VarTupleType():
            yield where, kind.max_length
            yield from collections_of(kind.item_type, where)
        case inspect.DictType():
            yield where, kind.max_length
            yield from collections_of(kind.value_type, where)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_list_and_map_of_a_message_has_a_largest_length(kind: type[Struct]) -> None:
    unbounded = [where for where, most in collections_of(inspect.type_info(kind), kind.__name__) if not most]
    assert not unbounded


@pytest.mark.parametrize(
    "fields",
    [
        {"samples_per_class": [1] * 60_000},
        {"samples": 2**40},
        {"samples_per_class": [2**40]},
        {"machine": "m" * 201},
        {"python": "3" * 201},
        {"onnxruntime": "1" * 201},
        {"agent": "1" * 201},
        {"notes": ["a"] * 65},
        {"drift": 1e300},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_capability_beyond_the_limits_is_rejected(fields: dict[str, Any]) -> None:
    valid = {
        "tier": "head",
        "machine": "m",
        "python": "3",
        "samples_per_class": [1] * 1024,
        "notes": ["a"] * 64,
    }
    assert decode(json.dumps(valid).encode(), Capability).notes
    with pytest.raises(ProtocolError, match=next(iter(fields))):
        decode(json.dumps({**valid, **fields}).encode(), Capability)


@pytest.mark.parametrize(
    "fields",
    [
        {"metrics": {f"m{i}": 0.5 for i in range(65)}},
        {"metrics": {"m" * 65: 0.5}},
        {"seconds": -1.0},
        {"seconds": 1e300},
    ],
    ids=["metrics", "name", "negative", "long"],
)
def test_a_report_beyond_the_limits_is_rejected(fields: dict[str, Any]) -> None:
    valid = {"id": "r", "kind": "head", "boot": "b", "samples": 1, "metrics": {"m": 0.5}, "seconds": 1.5}
    assert decode(json.dumps(valid).encode(), Report).metrics
    with pytest.raises(ProtocolError):
        decode(json.dumps({**valid, **fields}).encode(), Report)
