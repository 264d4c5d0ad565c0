"""Hints about missing packages: which extra of this distribution installs a module, read from the installed metadata."""

from __future__ import annotations

import re
import traceback
from importlib import metadata

LARGEST_FIRST = ("mcp", "scale", "server", "full", "flash")
SERVER_SIDE = {"edge_fl_server", "edge_fl_lab", "edge_fl_console"}


def hint(error: BaseException) -> str:
    """Format ``needs pip install 'edge-fl[server]' (torch is not installed)``; empty unless `error` is about a module of an extra."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return ""
    module = error.name.partition(".")[0]
    extra = _smallest_extras().get(_normal(module))
    if extra is None:
        return ""
    # The server needs more than the first missing module, so name the extra that has all of it.
    callers = {
        str(frame.f_globals.get("__name__")).partition(".")[0]
        for frame, _ in traceback.walk_tb(error.__traceback__)
    }
    if extra == "full" and callers & SERVER_SIDE:
        extra = "server"
    return f"needs pip install 'edge-fl[{extra}]' ({module} is not installed)"


def _smallest_extras() -> dict[str, str]:
    requirements = metadata.requires("edge-fl") or []
    return {
        _normal(name[0]): extra
        for extra in LARGEST_FIRST
        for requirement in requirements
        if re.search(rf"extra == ['\"]{extra}['\"]", requirement)
        and (name := re.match(r"[\w.-]+", requirement))
    }


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
