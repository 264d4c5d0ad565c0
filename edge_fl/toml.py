"""Settings in TOML, read into frozen structs: an unknown key is an error that names the nearest known one, a wrong value names its place.

The American spelling of "optimiser" is accepted.
"""

from __future__ import annotations

import math
import re
import reprlib
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import Struct

from edge_fl.errors import ConfigError, nearest
from edge_fl.fields import EXPECTED_NAME, NAME
from edge_fl.files import paths, user_text
from edge_fl.files.user_text import EncodingError

S = TypeVar("S", bound=Struct)


def read(path: Path) -> dict[str, Any]:
    """Read a TOML file as nested dicts. Raises ConfigError."""
    expected = "expected settings in TOML"
    try:
        text = user_text.read(path)
    except EncodingError as error:
        raise ConfigError(f"{paths.text(path)}: {error}; {expected}") from error
    except OSError as error:
        raise ConfigError(f"{paths.text(path)}: cannot be read ({error.strerror}); {expected}") from error
    return parse(text, paths.text(path))


def checked(tree: dict[str, Any], kind: type[S], where: str) -> S:
    """Convert nested dicts to a struct of settings; numbers must be finite. Raises ConfigError, which names key and nearest known one."""
    try:
        settings = msgspec.convert(tree, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{where}: {_explain(str(error), tree, kind)}") from error
    for keys, value in _numbers(tree):
        if not math.isfinite(value):
            raise ConfigError(f"{where}: {_place(keys)} = {value}: expected a finite number")
    return settings


def apply(settings: Iterable[str], tree: dict[str, Any]) -> None:
    """Set "rounds=3" or "model.options.width=8" in nested dicts. Raises ConfigError."""
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"setting {setting!r}: expected key=value, such as rounds=3")
        table, *rest = [tree, *key.strip().replace("optimizer", "optimiser").split(".")]
        for name in rest[:-1]:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ConfigError(f"setting {setting!r}: {name} holds a value, not a table")
        table[rest[-1]] = parse_value(value.strip())


def parse_value(text: str) -> Any:
    """Parse a TOML value; anything else is a string, so bare words need no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse(text: str, where: str) -> dict[str, Any]:
    """Parse TOML; `where` starts the error message. Raises ConfigError."""
    try:
        tree: dict[str, Any] = _respelled(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: not TOML ({error})") from error
    return tree


def _respelled(tree: Any) -> Any:
    """Accept the key "optimizer" for "optimiser"."""
    if not isinstance(tree, dict):
        return tree
    respell = "optimiser" not in tree
    return {
        "optimiser" if respell and key == "optimizer" else key: _respelled(value)
        for key, value in tree.items()
    }


def _numbers(tree: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every float in nested dicts and lists, with its keys."""
    match tree:
        case float():
            yield keys, tree
        case dict():
            for key, value in tree.items():
                yield from _numbers(value, (*keys, str(key)))
        case list() | tuple():
            for value in tree:
                yield from _numbers(value, keys)


def _explain(message: str, tree: dict[str, Any], kind: type[Struct]) -> str:
    """Rewrite a msgspec message ("Expected `int` >= 1 - at `$.data.clients`") with the table, the key and the value in `tree`."""
    reason, _, path = message.partition(" - at `$")
    # msgspec writes "[...]" for any key of a table of tables.
    keys = re.findall(r"\w+(?:\[\d+\])*|\*", path.replace("[...]", ".*"))
    if unknown := re.search(r"unknown field `(.*)`", reason):
        table, key = ".".join(keys), unknown[1]
        known = nearest(key, _field(keys, kind).__struct_fields__)
        return f"[{table}] unknown key {key!r}{known}" if table else f"unknown key {key!r}{known}"
    if missing := re.search(r"missing required field `(.*)`", reason):
        return f"{_place([*keys, missing[1]])}: missing, expected a value"
    value: Any = tree
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    given = f" = {reprlib.repr(value)}" if value is not None else ""
    if reason.startswith("Invalid enum value"):
        reason = f"unknown name{nearest(str(value), _words(_field(keys, kind)))}"
    if NAME in reason:
        reason = EXPECTED_NAME
    if "^folder:/" in reason:
        reason = "expected folder:/PATH, a folder on the device"
    if "https?" in reason:
        reason = "expected an address that begins with http:// or https://"
    return f"{_place(keys)}{given}: {reason[:1].lower()}{reason[1:]}"


def _field(keys: list[str], kind: Any) -> Any:
    """The type of the field at `keys` below the struct `kind`."""
    for key in keys:
        if key == "*":
            continue
        kind = next(field.type for field in msgspec.structs.fields(kind) if field.name == key)
        inside = (part for part in get_args(kind) if isinstance(part, type) and issubclass(part, Struct))
        kind = next(inside, kind)  # `Struct | None` and dict[str, Struct] lead to the struct
    return kind


def _words(kind: Any) -> list[str]:
    """The strings allowed by a Literal anywhere in a type."""
    return [word for part in get_args(kind) for word in ([part] if isinstance(part, str) else _words(part))]


def _place(keys: Sequence[str]) -> str:
    """Format keys as "[data] clients"."""
    *tables, key = keys or ["recipe"]
    return f"[{'.'.join(tables)}] {key}" if tables else key
