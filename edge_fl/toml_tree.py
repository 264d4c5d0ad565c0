"""TOML as nested dicts, with the American spelling of "optimiser" accepted."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from typing import Any

from edge_fl.errors import ConfigError


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


def numbers(tree: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every float in nested dicts and lists, with its keys."""
    match tree:
        case float():
            yield keys, tree
        case dict():
            for key, value in tree.items():
                yield from numbers(value, (*keys, str(key)))
        case list() | tuple():
            for value in tree:
                yield from numbers(value, keys)
