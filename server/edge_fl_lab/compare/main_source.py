"""The source of a user's script, or of the cells of a notebook that define functions and classes: what a stored cell depends on."""

import linecache
import sys
from collections.abc import Iterator
from inspect import isclass, isfunction
from pathlib import Path

from edge_fl.plugins import MAIN


def script() -> Path | None:
    """The file of the script that runs; None in a notebook."""
    file = getattr(sys.modules[MAIN], "__file__", None)
    return Path(file) if file else None


def cells() -> str:
    """The cells of the notebook that define its present functions and classes, one after the other; "" in a script."""
    if script():
        return ""
    defined = [each for each in vars(sys.modules[MAIN]).values() if getattr(each, "__module__", "") == MAIN]
    files = {name for each in defined for name in _files(each)}
    return "\n".join(sorted("".join(linecache.getlines(name)) for name in files))


def _files(defined: object) -> Iterator[str]:
    for each in vars(defined).values() if isclass(defined) else [defined]:
        if isfunction(each):
            yield each.__code__.co_filename
