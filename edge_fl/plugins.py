"""Methods, models, heads, engines and services of other packages: registered as entry points, or named `package.module:attribute`."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from edge_fl.errors import InputError


def names(group: str) -> dict[str, str]:
    """The names registered in an entry point group, ascending -> the package that registers them."""
    return {
        point.name: package(point)
        for point in sorted(entry_points(group=group), key=lambda point: point.name)
    }


def all_registered(group: str) -> dict[str, Any]:
    """All objects registered in an entry point group, by name, ascending. Raises ImportError or AttributeError for a broken one."""
    return {
        point.name: point.load() for point in sorted(entry_points(group=group), key=lambda point: point.name)
    }


def package(point: EntryPoint) -> str:
    """The name of the package that registers an entry point."""
    return point.dist.name if point.dist else point.module


def registered(group: str, name: str, what: str, error: type[InputError]) -> Any | None:
    """The object registered under a name; None if there is none. Raises `error` if it cannot be imported."""
    for point in entry_points(group=group, name=name):
        try:
            return point.load()
        except (ImportError, AttributeError) as cause:
            where = f"entry point {point.value} of package {package(point)}"
            raise error(f"{what} {name!r}: cannot be imported ({cause}); expected the {where}") from cause
    return None


def imported(name: str, what: str, error: type[InputError]) -> Any:
    """The object `package.module:attribute`. Raises `error` if it cannot be imported."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as cause:
        raise error(f"{what} {name!r}: cannot be imported ({cause})") from cause


def allow_working_folder() -> None:
    """Let this process and its children import a user's own modules from the working folder, after the installed packages.

    For commands started by a person. A device builds what a server names, so it imports installed packages only.
    """
    if (here := os.fspath(Path.cwd())) not in sys.path:
        sys.path.append(here)
