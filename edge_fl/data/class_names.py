"""Rules for class names: a device finds the pictures of a class in the folder of this name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from difflib import get_close_matches

from edge_fl.config import MAX_CLASSES
from edge_fl.errors import ConfigError

LONGEST = 100  # characters
OUTSIDE = "in a folder that is not in the class list"
"""Begins the reason why a device skips a picture: it sends these reasons with counts, but no name of a folder."""


def require_class_names(names: Sequence[str], where: str) -> None:
    """Raise ConfigError unless `names` are two or more different names of folders; the message starts with `where`."""
    if not 2 <= len(names) <= MAX_CLASSES:
        found = f"1 class ({names[0]})" if len(names) == 1 else f"{len(names)} classes"
        raise ConfigError(
            f"{where}: {found}, expected 2 to {MAX_CLASSES}, each the name of a folder of pictures"
        )
    for number, name in enumerate(names, 1):
        if found := flaw(name):
            raise ConfigError(f"{where}: class {number}, {name[:LONGEST]!r}, {found}")
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ConfigError(f"{where}: class {repeated[0]!r} occurs more than once, expected different names")


def outside(folder: str, classes: Sequence[str]) -> str:
    """The reason to skip pictures of a folder outside the class list, with the nearest class: OUTSIDE, nearest 'horse'."""
    near = nearest_class(folder, classes)
    return f"{OUTSIDE}, nearest {near!r}" if near else OUTSIDE


def nearest_class(folder: str, classes: Sequence[str]) -> str:
    """The class whose name is similar to that of a folder, ignoring case; "" if none is."""
    by_name = {name.lower(): name for name in classes}
    return next((by_name[near] for near in get_close_matches(folder.lower(), by_name, n=1)), "")


def flaw(name: str) -> str:
    """Return why this cannot be the name of a class; "" if it can."""
    if not name.strip():
        return "is empty; expected the name of a folder of pictures"
    if name != name.strip():
        return "begins or ends with a space"
    if len(name) > LONGEST:
        return f"has {len(name)} characters, at most {LONGEST}"
    if "/" in name or name.startswith(".") or not name.isprintable():
        return (
            "cannot be the name of a folder of pictures (no '/', no '.' at the start, no control characters)"
        )
    return ""
