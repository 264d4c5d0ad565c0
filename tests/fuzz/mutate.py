"""Mutations of a valid structure in one or a few fields, as text for a parser.

Random bytes would be rejected at the first byte. Here everything but a field is valid: its value has another type or lies
out of range, is missing, unknown or there twice; arrays are too long or too deep; numbers are none; the text is cut or not UTF-8.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Path = tuple[Any, ...]
MOST = 3  # mutations at once


@dataclass(frozen=True)
class Raw:
    """Raw text for the document, for content that no Python value encodes to."""

    text: str


class Pairs(list[tuple[str, Any]]):
    """An object that may contain duplicate keys."""


WORDS = ("", "NaN", "\x00", "../../etc/passwd", "x" * 70, "y" * 2001, "é" * 33, "\u202e", "a\n", "Ａ", "null")
NUMBERS = (
    -1,
    0,
    1,
    2**15,
    2**31,
    2**40 + 1,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63) - 1,
    2**70,
    10**400,
)
FLOATS = (0.5, -0.0, 1.0, 1e-320, 1e308, -1e308)
NO_JSON = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e400",
    "01",
    "1.",
    "+1",
    "'a'",
    "nul",
    '"\\ud800"',
    '"\\x"',
)
NO_TOML = (
    "nan",
    "inf",
    "-inf",
    "1e400",
    "01",
    "1979-05-27",
    "07:32:00",
    '"\\ud800"',
    "0x1",
    "1_0",
    "[[]]",
    "{}",
)


def wrong_values(raw: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """Replacements for a field's value."""
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from(NUMBERS),
        st.sampled_from(FLOATS),
        st.sampled_from(WORDS),
        st.sampled_from([Raw(text) for text in raw]),
    )
    inner = st.one_of(st.lists(leaves, max_size=3), st.dictionaries(st.text(max_size=4), leaves, max_size=3))
    return st.one_of(leaves, leaves, leaves, inner, st.sampled_from([_tower(list), _tower(dict)]))


def _tower(kind: type) -> Any:
    tree: Any = 0
    for _ in range(300):
        tree = [tree] if kind is list else {"a": tree}
    return tree


@st.composite
def mutated_trees(draw: st.DrawFn, tree: Any, raw: tuple[str, ...] = NO_JSON) -> Any:
    """The tree with one to three mutations."""
    for _ in range(draw(st.integers(1, MOST))):
        path = draw(st.sampled_from(sorted(paths(tree), key=repr)))
        tree = draw(st.sampled_from(CHANGES))(draw, tree, path, raw)
    return tree


@st.composite
def mutated_text(draw: st.DrawFn, text: bytes) -> bytes:
    """The text, mostly unchanged, otherwise with a few wrong bytes or truncated."""
    how = draw(st.sampled_from(["whole"] * 6 + ["flip", "cut", "not UTF-8", "more"]))
    at = draw(st.integers(0, max(len(text) - 1, 0)))
    match how:
        case "flip":
            return text[:at] + bytes([draw(st.integers(0, 255))]) + text[at + 1 :]
        case "cut":
            return text[:at]
        case "not UTF-8":
            return text[:at] + draw(st.sampled_from([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00"])) + text[at:]
        case "more":
            return text + draw(st.sampled_from([b"x", b"{}", b"\n[broker]\n", text[:200]]))
    return text


def paths(tree: Any, path: Path = ()) -> Iterator[Path]:
    """Paths in nested objects and lists."""
    yield path
    for key, value in children(tree):
        yield from paths(value, (*path, key))


def children(tree: Any) -> list[tuple[Any, Any]]:
    """(key, value) of an object, (index, item) of a list, nothing otherwise; a very deep value counts as one."""
    match tree:
        case Pairs():
            return list(enumerate(value for _, value in tree))
        case dict() if not _is_tower(tree):
            return list(tree.items())
        case list() if not _is_tower(tree):
            return list(enumerate(tree))
    return []


def _is_tower(tree: Any) -> bool:
    depth = 0
    while isinstance(tree, list | dict) and len(tree) == 1 and depth < 50:
        tree, depth = (tree[0] if isinstance(tree, list) else next(iter(tree.values()))), depth + 1
    return depth == 50


def changed(tree: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """Copy the tree with `change` applied to the value at `path`."""
    if not path:
        return change(tree)
    copy = type(tree)(tree)
    if isinstance(copy, Pairs):
        key, value = copy[path[0]]
        copy[path[0]] = key, changed(value, path[1:], change)
    else:
        copy[path[0]] = changed(copy[path[0]], path[1:], change)
    return copy


def _replaced(draw: st.DrawFn, tree: Any, path: Path, raw: tuple[str, ...]) -> Any:
    value = draw(wrong_values(raw))
    return changed(tree, path, lambda _: value)


def _nudged(draw: st.DrawFn, tree: Any, path: Path, raw: tuple[str, ...]) -> Any:
    """A value of the right type, slightly changed."""
    step = draw(st.sampled_from([-1, 1, 2**20]))

    def nudge(value: Any) -> Any:
        match value:
            case bool():
                return not value
            case int() | float():
                return value + step
            case str():
                return draw(st.sampled_from([value[:-1], value + "x", value.upper(), value * 40]))
            case list() if not isinstance(value, Pairs):
                return draw(st.sampled_from([value[:-1], value + value, value[:1] * 1025, value[::-1]]))
        return value

    return changed(tree, path, nudge)


def _without(draw: st.DrawFn, tree: Any, path: Path, raw: tuple[str, ...]) -> Any:
    """Remove one key or item."""

    def drop(value: Any) -> Any:
        if not children(value):
            return value
        key = draw(st.sampled_from([key for key, _ in children(value)]))
        copy = type(value)(value)
        del copy[key]
        return copy

    return changed(tree, path, drop)


def _with_unknown(draw: st.DrawFn, tree: Any, path: Path, raw: tuple[str, ...]) -> Any:
    name, value = draw(st.sampled_from(["new", "", "a b", "__class__", "ä", "seed"])), draw(wrong_values(raw))

    def add(thing: Any) -> Any:
        if isinstance(thing, Pairs):
            return Pairs([*thing, (name, value)])
        return {**thing, name: value} if isinstance(thing, dict) else thing

    return changed(tree, path, add)


def _doubled(draw: st.DrawFn, tree: Any, path: Path, raw: tuple[str, ...]) -> Any:
    """A duplicate key, with the same value or another one."""

    def double(thing: Any) -> Any:
        pairs = (
            list(thing)
            if isinstance(thing, Pairs)
            else list(thing.items())
            if isinstance(thing, dict)
            else []
        )
        if not pairs or _is_tower(thing):
            return thing
        key, value = draw(st.sampled_from(pairs))
        other = draw(st.one_of(st.just(value), wrong_values(raw)))
        return Pairs([*pairs, (key, other)])

    return changed(tree, path, double)


CHANGES = (_replaced, _replaced, _replaced, _nudged, _nudged, _without, _with_unknown, _doubled)


def to_json(tree: Any) -> bytes:
    """Encode the tree as JSON, apart from raw text."""
    return _json(tree).encode("utf-8", "surrogatepass")


def _json(tree: Any) -> str:
    match tree:
        case Raw(text):
            return text
        case Pairs():
            return "{" + ",".join(f"{json.dumps(key)}:{_json(value)}" for key, value in tree) + "}"
        case dict():
            return "{" + ",".join(f"{json.dumps(key)}:{_json(value)}" for key, value in tree.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(map(_json, tree)) + "]"
    return json.dumps(tree)


def to_toml(tree: dict[str, Any] | Pairs) -> bytes:
    """Encode the tree as TOML, apart from raw text: tables at the top, deeper values inline."""
    pairs = list(tree if isinstance(tree, Pairs) else tree.items())
    is_table = {index: isinstance(value, dict | Pairs) for index, (_, value) in enumerate(pairs)}
    lines = [
        f"{_key(key)} = {_toml(value)}" for index, (key, value) in enumerate(pairs) if not is_table[index]
    ]
    for index, (key, value) in enumerate(pairs):
        if is_table[index]:
            inside = value if isinstance(value, Pairs) else value.items()
            lines += [f"[{_key(key)}]", *(f"{_key(name)} = {_toml(item)}" for name, item in inside)]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _key(key: str) -> str:
    return json.dumps(key)


def _toml(tree: Any) -> str:
    match tree:
        case Raw(text):
            return text
        case Pairs():
            return "{" + ", ".join(f"{_key(key)} = {_toml(value)}" for key, value in tree) + "}"
        case dict():
            return "{" + ", ".join(f"{_key(key)} = {_toml(value)}" for key, value in tree.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_toml, tree)) + "]"
        case float():
            return repr(tree)
    return json.dumps(tree)  # TOML has no null: one of the mutations
