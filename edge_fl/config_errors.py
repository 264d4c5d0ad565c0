"""Translate msgspec's validation errors into the terms of a TOML file: table, key, value, known names."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from msgspec import Struct

from edge_fl.errors import nearest
from edge_fl.fields import EXPECTED_NAME, NAME


def explain(message: str, tree: dict[str, Any], kind: type[Struct]) -> str:
    """Rewrite a msgspec message ("Expected `int` >= 1 - at `$.data.clients`") with the table, the key and the value in `tree`."""
    reason, _, path = message.partition(" - at `$")
    # msgspec writes "[...]" for any key of a table of tables.
    keys = re.findall(r"\w+(?:\[\d+\])*|\*", path.replace("[...]", ".*"))
    if unknown := re.search(r"unknown field `(.*)`", reason):
        table, key = ".".join(keys), unknown[1]
        known = nearest(key, _field(keys, kind).__struct_fields__)
        return f"[{table}] unknown key {key!r}{known}" if table else f"unknown key {key!r}{known}"
    if missing := re.search(r"missing required field `(.*)`", reason):
        return f"{place([*keys, missing[1]])}: missing, expected a value"
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
    return f"{place(keys)}{given}: {reason[:1].lower()}{reason[1:]}"


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


def place(keys: Sequence[str]) -> str:
    """Format keys as "[data] clients"."""
    *tables, key = keys or ["recipe"]
    return f"[{'.'.join(tables)}] {key}" if tables else key
