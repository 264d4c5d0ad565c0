"""Methods, models, heads, engines and services of other packages: registered as entry points, or named `package.module:attribute`.

A name may also be that of a file below the working folder, `folder/module.py:attribute`, which is the module `folder.module`.
"""

from __future__ import annotations

import importlib
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from pathlib import Path
from typing import Any

from edge_fl.errors import STOPPED, EdgeFLError, InputError, RunError, brief, similar
from edge_fl.files.paths import text

MAIN = "__main__"
FILE = ".py"
INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages."""


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
        except Exception as cause:
            where = f"entry point {point.value} of package {package(point)}"
            raise error(
                f"{what} {name!r}: cannot be imported ({described(cause)}); expected the {where}"
            ) from cause
    return None


def imported(name: str, what: str, error: type[InputError]) -> Any:
    """The object `package.module:attribute`, or `folder/module.py:attribute`. Raises `error` if it cannot be imported."""
    place, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_of(name))
        if place.endswith(FILE):
            _require_file(module, Path(place))
        return _attribute(module, attribute)
    except EdgeFLError:
        raise
    except Exception as cause:
        missing = isinstance(cause, AttributeError) and not own_line(cause)
        hint = similar(attribute, vars(module)) if missing else ""
        raise error(f"{what} {name!r}: cannot be imported ({described(cause)}){hint}") from cause


def _attribute(module: Any, name: str) -> Any:
    try:
        return getattr(module, name)  # a module may answer for any name, such as that of a file
    except AttributeError:
        return attrgetter(name)(module)  # a class inside another one


def module_of(name: str) -> str:
    """The module of `package.module:attribute` or `folder/module.py:attribute`: "package.module", "folder.module".

    Raises ImportError for a file that does not exist, or that is not below the working folder.
    """
    module = name.partition(":")[0]
    if not module.endswith(FILE):
        return module
    if not Path(module).is_file():
        raise ImportError(f"no file {text(module)}")
    here = Path.cwd()
    path = Path(os.path.normpath(here / module))
    if not path.is_relative_to(here):
        raise ImportError(f"expected a file below the working folder, {text(here)}")
    return os.fspath(path.relative_to(here).with_suffix("")).replace(os.sep, ".")


def _require_file(module: Any, file: Path) -> None:
    """Raise ImportError for a module that is another file, of the same name."""
    found = getattr(module, "__file__", None)
    if not (found and file.samefile(found)):
        raise ImportError(
            f"there is another module {module.__name__!r}, {found or 'built in'}; expected a name of its own"
        )


def name_of(found: Any, what: str, error: type[InputError]) -> str:
    """The name `package.module:attribute` of a class or function. Raises `error` for one that its module does not have under this name."""
    name = f"{found.__module__}:{found.__qualname__}"
    if "<locals>" in name:
        raise error(
            f"{what} {found.__name__}: defined inside a function; expected at the top level of a module or notebook"
        )
    if imported(name, what, error) is not found:
        raise error(
            f"{what} {found.__name__}: its module has another object under this name now; expected that one"
        )
    return name


def is_own(name: str) -> bool:
    """Whether a name is that of a module's attribute, not of a list."""
    return ":" in name


def allow_working_folder() -> None:
    """Let this process and its children import a user's own modules from the working folder, after the installed packages.

    For commands started by a person. A device builds what a server names, so it imports installed packages only.
    """
    if (here := os.fspath(Path.cwd())) not in sys.path:
        sys.path.append(here)


def described(error: BaseException) -> str:
    """An error in one line, with its place where a user's own code raised it: `gentle.py:14, "x = y": NameError: ...`."""
    reason = " ".join(str(error).split())
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_place(error.filename, error.lineno)}: {type(error).__name__}: {error.msg}"
    if not (where := own_line(error)):
        return reason
    return f"{where}: {type(error).__name__}{f': {brief(reason)}' if reason else ''}"


@contextmanager
def blaming(what: str, *names: str) -> Iterator[None]:
    """Raise an error of a user's own code in the block as RunError, which names its file and line; any other error as it is.

    `names` are those of the run's method and model: with one of the user's own, an error elsewhere may follow from what that returned.
    """
    try:
        yield
    except (EdgeFLError, MemoryError):
        raise
    except Exception as error:
        found = [name for name in names if is_own(name)]
        if own_line(error):
            raise RunError(f"{what}: {described(error)}", STOPPED) from error
        if not found:
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{text(Path(last.filename).name)}:{last.lineno}"
        raise RunError(
            f"{what}: {type(error).__name__}: {brief(described(error))} ({place}), probably because of what {' or '.join(found)} returned",
            STOPPED,
        ) from error


def own_line(error: BaseException) -> str:
    """The last place of a user's own code that an error passed, `gentle.py:14, "x = y"`; "" if it passed none.

    Own is what is neither edge-fl, nor installed, nor Python's.
    """
    own = [f for f in traceback.extract_tb(error.__traceback__) if _is_own(f.filename)]
    if not own:
        return ""
    code = linecache.getline(own[-1].filename, own[-1].lineno or 0).strip()
    return _place(own[-1].filename, own[-1].lineno) + (f', "{brief(code)}"' if code else "")


def _is_own(filename: str) -> bool:
    if filename.startswith("<"):
        return filename.startswith("<ipython-input")
    path = Path(filename)
    ours = [
        Path(module.__file__).parent
        for name, module in [*sys.modules.items()]
        if name.startswith("edge_fl") and "." not in name and module.__file__
    ]
    return not (INSTALLED & {*path.parts} or any(map(path.is_relative_to, [Path(os.__file__).parent, *ours])))


def _place(filename: str, line: int | None) -> str:
    if "ipykernel" in filename or filename.startswith("<"):
        return f"line {line} of a cell"
    path, here = Path(filename), Path.cwd()
    return f"{text(path.relative_to(here) if path.is_relative_to(here) else path)}:{line}"
