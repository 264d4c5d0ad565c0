"""Hashes of the source code that a cell's numbers depend on: what it does, not how it is written.

Comments, docstrings, formatting, and annotations of functions and variables do not count; those of a class's fields do, because dataclasses
and msgspec read them. Hashes are equal under all versions of Python.

The source of a method is its file and the modules that it imports, own modules of the user included; the same holds for a model. All other
code that affects numbers is the framework.
"""

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path

import edge_fl
import edge_fl_server
from edge_fl import methods, models, plugins
from edge_fl.config import ModelConfig
from edge_fl.models import backbones, frozen
from edge_fl_lab.compare import main_source

PLACES = (
    "edge_fl_server/training",
    "edge_fl_server/orchestrate/execution.py",
    "edge_fl_lab/compare/cell_runs.py",
    "edge_fl_lab/features.py",
    "edge_fl_lab/newcomers.py",
    "edge_fl_lab/recipe_heads.py",
)
"""Files of the server and of the lab that affect numbers; of `edge_fl` all do, except those of single methods and models."""

_ROOT = Path(edge_fl.__file__).parent.parent
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages, also those of other environments on the path."""
_FOR_TYPES = {"__future__", "typing", "collections.abc"}
"""Modules whose names matter only where they are used."""


def of_modules(*names: str) -> str:
    """Hash of modules and of all that they import, without the framework; a notebook's code changes, so it is read each time."""
    if plugins.MAIN not in names:
        return _of_files(*names)
    return _hash(imported(names).values(), _meaning_of(main_source.cells()))


# Cached: code in memory does not change when its file does, so one process has one hash per source.
@cache
def _of_files(*names: str) -> str:
    return _hash(imported(names).values())


@cache
def of_framework() -> str:
    """Hash of all code that every cell runs. Of the two registries only the functions count: an entry added is no change."""
    registries = [Path(package.__file__ or "") for package in (methods, models)]
    own = {path for registry in registries for path in registry.parent.glob("*.py")}
    files = [path for path in (_ROOT / "edge_fl").rglob("*.py") if path not in own]
    for place in PLACES:
        path = Path(edge_fl_server.__file__).parents[1] / place
        files += path.rglob("*.py") if path.is_dir() else [path]
    functions: list[ast.stmt] = [
        node
        for path in registries
        for node in ast.parse(path.read_bytes()).body
        if isinstance(node, ast.FunctionDef)
    ]
    return _hash(files, _meaning(ast.Module(functions, [])))


def _hash(files: Iterable[Path], text: str = "") -> str:
    digest = hashlib.sha256(text.encode())
    for path in sorted(files):
        meaning = _meaning(ast.parse(path.read_bytes()))
        digest.update(hashlib.sha256(meaning.encode(errors="surrogatepass")).digest())
    return digest.hexdigest()


def _meaning_of(cells: str) -> str:
    try:
        return _meaning(ast.parse(cells))
    except SyntaxError:  # a notebook's own commands, such as %matplotlib
        return cells


def _meaning(tree: ast.Module) -> str:
    """A syntax tree as text, without all that has no effect when the code runs; the tree is changed."""
    written: list[str] = []
    _write(_Stripped().visit(tree), written)
    return "".join(written)


def _write(value: object, written: list[str]) -> None:
    """Append a node, a list of nodes or a constant. Empty fields are left out: which ones a node has depends on the version of Python."""
    if isinstance(value, ast.AST):
        written.append(f"{type(value).__name__}(")
        for name in value._fields:
            if name != "kind" and (field := getattr(value, name, None)) not in (None, []):
                written.append(f"{name}=")
                _write(field, written)
        written.append(")")
    elif isinstance(value, list):
        written.append("[")
        for item in value:
            _write(item, written)
        written.append("]")
    else:
        written.append(f"{value!r},")


class _Stripped(ast.NodeTransformer):
    """Remove what has no effect when the code runs."""

    def __init__(self) -> None:
        self._in_class = False

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._inside(node, in_class=True)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = node.type_comment = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if not self._in_class:
            if node.value:
                return self.generic_visit(ast.Assign([node.target], node.value))
            node.annotation = ast.Constant(None)  # a name of this function, not of the module
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Pass(self, node: ast.Pass) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if node.module in _FOR_TYPES and not node.level else node

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        test = getattr(node.test, "attr", None) or getattr(node.test, "id", None)
        return node.orelse if test == "TYPE_CHECKING" else node

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        node.__dict__.pop("type_params", None)  # from Python 3.12 on
        return self._inside(node, in_class=False)

    def _inside(self, node: ast.AST, *, in_class: bool) -> ast.AST:
        before, self._in_class = self._in_class, in_class
        self.generic_visit(node)
        self._in_class = before
        return node


def modules_of_model(model: ModelConfig) -> tuple[str, ...]:
    """The modules of a model, that of frozen models included if it does not train as a whole."""
    trained = () if model.train == "all" else (frozen.__name__,)
    if backbones.is_backbone(model.name):
        return backbones.__name__, *trained
    own = plugins.is_own(model.name)
    return plugins.module_of(model.name) if own else models.MODELS[model.name].__module__, *trained


def imported(names: tuple[str, ...]) -> dict[str, Path]:
    """The files of modules and of all that they import, without the framework, the standard library and other installed packages."""
    found: dict[str, Path] = {}
    waiting = list(names)
    tops = {name.partition(".")[0] for name in names}
    while waiting:
        name = waiting.pop()
        if name in found or (path := _file(name, tops)) is None:
            continue
        found[name] = path
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        waiting += _imports(path, package)
    return found


def _file(name: str, tops: set[str]) -> Path | None:
    top, _, rest = name.partition(".")
    if name == plugins.MAIN:
        return main_source.script()
    framework = top == "edge_fl" and (
        not rest.startswith(("methods.", "models")) or rest.startswith("methods.contract")
    )
    if framework or top in sys.stdlib_module_names or top == "edge_fl_server":
        return None
    try:
        outer = find_spec(top)
        if outer is None or (top not in tops and _INSTALLED & {*Path(outer.origin or "").parts}):
            return None
        spec = find_spec(name)  # imports the packages around it
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def _imports(path: Path, package: str) -> Iterator[str]:
    """Every module that a file's import statements may name."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        elif isinstance(node, ast.ImportFrom):
            relative = "." * node.level + (node.module or "")
            module = resolve_name(relative, package) if node.level else relative
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
