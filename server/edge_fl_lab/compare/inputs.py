"""What the numbers of a cell depend on apart from its recipe: data, split, source code, engine, versions.

A stored result whose inputs differ from today's is run again. The source of a method is its file and the modules that it imports, own
modules of the user included; the same holds for a model. All other code that affects numbers counts as "source of edge_fl".
"""

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.util import find_spec, resolve_name
from pathlib import Path

import edge_fl
import edge_fl_server
from edge_fl import heads, methods, models
from edge_fl.config import ModelConfig
from edge_fl.data.samples import Dataset
from edge_fl.methods.finetuned import FineTuned
from edge_fl.models import backbones, frozen, lora
from edge_fl_server.orchestrate.execution import torch_device
from edge_fl_server.training.studies import Study

LIBRARIES = ("torch", "numpy")
PLACES = (
    *(
        f"edge_fl_server/{place}"
        for place in ("training", "orchestrate/execute.py", "orchestrate/run_setup.py")
    ),
    *(
        f"edge_fl_lab/{place}"
        for place in ("compare/cell_runs.py", "features.py", "newcomers.py", "recipe_heads.py")
    ),
)
"""Files of the server and of this package that affect numbers; of `edge_fl` all do, except those of single methods and models."""

_ROOT = Path(edge_fl.__file__).parent.parent
_INSTALLED = {
    "site-packages",
    "dist-packages",
}  # folders of installed packages, also those of other environments on the path


def of_study(study: Study) -> dict[str, str]:
    """Hash or version of each input by its name."""
    recipe = study.recipe
    method, model = recipe.method.name, recipe.model.name
    found = methods.find(method)
    tuning = [FineTuned.__module__] if method.endswith("+ft") else []
    return {
        f"data of {study.dataset.name}": _data(study.dataset),
        f"split of {study.dataset.name}": study.split.fingerprint(),
        f"source of method {method}": _source(found.__module__, *tuning),
        f"source of model {model}": _source(*_modules_of_model(recipe.model)),
        **({f"weights of model {model}": study.spec.model.weights} if study.spec.model.weights else {}),
        **{f"source of head {name}": _source(heads.resolve(name).__module__) for name in recipe.heads},
        "source of edge_fl": _framework(),
        "engine": f"{recipe.engine} on {torch_device(recipe.device)}",
        **{f"version of {library}": version(library) for library in LIBRARIES},
    }


def changes(stored: Mapping[str, str], today: Mapping[str, str]) -> list[str]:
    """The reasons for running a cell again; empty if its inputs are the same."""
    if not stored:
        return ["stored without its inputs"]
    return [f"{name} changed" for name in {**today, **stored} if stored.get(name) != today.get(name)]


@lru_cache(maxsize=1)
def _data(dataset: Dataset) -> str:
    return dataset.fingerprint()


# Cached: code in memory does not change when its file does, so one process has one hash per source.
@cache
def _source(*names: str) -> str:
    return _hash(_imported(names).values())


@cache
def _framework() -> str:
    """Hash of all code that every cell runs. Of the two registries only the functions count: an entry added is no change."""
    registries = [Path(package.__file__ or "") for package in (methods, models)]
    own = {path for registry in registries for path in registry.parent.glob("*.py")}
    files = [path for path in (_ROOT / "edge_fl").rglob("*.py") if path not in own]
    for place in PLACES:
        path = Path(edge_fl_server.__file__).parents[1] / place
        files += path.rglob("*.py") if path.is_dir() else [path]
    functions = [
        ast.unparse(node)
        for path in registries
        for node in ast.parse(path.read_bytes()).body
        if isinstance(node, ast.FunctionDef)
    ]
    return _hash(files, "\n".join(functions))


def _hash(files: Iterable[Path], text: str = "") -> str:
    digest = hashlib.sha256(text.encode())
    for path in sorted(files):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _modules_of_model(model: ModelConfig) -> tuple[str, ...]:
    trained = {"all": (), "none": (frozen.__name__,), "lora": (lora.__name__,)}[model.train]
    if backbones.is_backbone(model.name):
        return backbones.__name__, *trained
    own, colon, _ = model.name.partition(":")
    return own if colon else models.MODELS[model.name].__module__, *trained


def _imported(names: tuple[str, ...]) -> dict[str, Path]:
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
