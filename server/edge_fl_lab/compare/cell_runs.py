"""One cell of a comparison: run it, measure it, and store the result, so that an interrupted comparison can be resumed.

FOLDER/cells/<key>.json    the result, or the reason of the failure
FOLDER/cells/<key>.npz     features of test images, for plots

A stored result whose inputs differ from today's is run again: data, split, source code, engine, versions. The source of a method is its
file and the modules that it imports, own modules of the user included; the same holds for a model. All other code that affects numbers
counts as "source of edge_fl".
"""

import ast
import hashlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.util import find_spec, resolve_name
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn

import edge_fl
import edge_fl_server
from edge_fl import heads, methods, metrics, models, plugins
from edge_fl.config import ModelConfig
from edge_fl.console.progress import Watch, unwatched
from edge_fl.data import datasets
from edge_fl.data.samples import Dataset
from edge_fl.errors import EdgeFLError, InputError
from edge_fl.files import atomic, npz
from edge_fl.files.paths import text
from edge_fl.learn.aggregation.mean import Update
from edge_fl.methods.contract.method import Method
from edge_fl.methods.finetuned import FineTuned
from edge_fl.metrics import Summary, summarise_reports
from edge_fl.models import backbones, frozen
from edge_fl.untrusted import NOT_JSON
from edge_fl_lab.compare import main_source
from edge_fl_lab.compare.grid import Cell
from edge_fl_lab.features import FeatureProbe, probe
from edge_fl_server.orchestrate import execution
from edge_fl_server.orchestrate.execution import simulated_clients, torch_device
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.training import studies
from edge_fl_server.training.clients import MEASURES, Clients, Downs, Step, WrappedClients
from edge_fl_server.training.engines.processes import threads
from edge_fl_server.training.rounds import FinalResult, RoundResult, RunHooks
from edge_fl_server.training.studies import Study

LIBRARIES = ("torch", "numpy")
PLACES = (
    "edge_fl_server/training",
    "edge_fl_server/orchestrate/execution.py",
    "edge_fl_lab/compare/cell_runs.py",
    "edge_fl_lab/features.py",
    "edge_fl_lab/newcomers.py",
    "edge_fl_lab/recipe_heads.py",
)
"""Files of the server and of this package that affect numbers; of `edge_fl` all do, except those of single methods and models."""

_ROOT = Path(edge_fl.__file__).parent.parent
_INSTALLED = {"site-packages", "dist-packages"}
"""Folders of installed packages, also those of other environments on the path."""


class Point(Struct, frozen=True, forbid_unknown_fields=True):
    """One round: duration, tensor bytes and size of the cohort, means over clients of the metrics evaluated.

    `weighted` are the means of accuracies weighted by the clients' test samples. `device_seconds` is the mean processor time of a client's
    local update, without evaluation; 0: not measured.
    """

    round: int
    seconds: float
    bytes_down: int
    bytes_up: int
    clients: int
    means: dict[str, float] = {}
    weighted: dict[str, float] = {}
    device_seconds: float = 0.0


class CellResult(Struct, frozen=True):
    """The result of one cell; after a `failure` there are no numbers.

    `last` is over all clients after the last round and the final personalisation, `participants` over those that took part in any round,
    `best` over all clients after `best_round`, the best by validation (0: none). `clients` holds the metrics by client, `highest` each
    client's highest value of each test accuracy in any evaluated round, which one paper prints. `inputs` is what the numbers depend on
    apart from the recipe (`inputs_of`), `engine` the engine that ran. `final_seconds` is the mean processor time of a client's final
    personalisation.
    """

    key: str
    label: str
    recipe: Recipe
    commit: str = ""
    inputs: dict[str, str] = {}
    engine: str = ""
    failure: str = ""
    seconds: float = 0.0
    curve: list[Point] = []
    final_seconds: float = 0.0
    last: dict[str, Summary] = {}
    participants: dict[str, Summary] = {}
    best_round: int = 0
    best: dict[str, Summary] = {}
    clients: dict[str, dict[str, float]] = {}
    highest: dict[str, dict[str, float]] = {}


def prepare(cell: Cell) -> Study:
    """Load the data of a cell and split them. Raises DataError."""
    recipe = cell.recipe
    if recipe.engine == "auto" and torch_device(recipe.device) == "cpu":
        # Cells already run in parallel, and one engine for all gives the same bits for any number of jobs.
        recipe = msgspec.structs.replace(recipe, engine="sequential")
    dataset = _dataset(recipe.data.dataset, Path(recipe.data.data_dir))
    return studies.of_dataset(recipe, dataset)


def run(cells: Sequence[Cell], folder: Path, commit: str = "", watch: Watch = unwatched) -> list[CellResult]:
    """Run cells that share their rounds (`grid.trainings`) in one thread and store each result.

    A failed run is a result too; only a failed write raises RunError.
    """
    start_s = time.monotonic()
    results = [CellResult(cell.key, cell.label, cell.recipe, commit) for cell in cells]
    # Sums depend on the number of threads, and a table must not depend on the number of concurrent cells.
    with threads(1), threadpool_limits(1):
        try:
            studies = [prepare(cell) for cell in cells]
            results = [
                msgspec.structs.replace(result, inputs=inputs_of(study))
                for result, study in zip(results, studies, strict=True)
            ]
            training = _Rounds(studies, watch)
            trained_s = time.monotonic() - start_s
        except Exception as error:
            results = [_failed(result, error, time.monotonic() - start_s) for result in results]
            for result in results:
                write(result, folder)
            return results
        for place, blank in enumerate(results):
            start_s = time.monotonic() - trained_s  # each result has the duration of its whole run
            try:
                result = training.finished(place, blank, folder)
                results[place] = msgspec.structs.replace(result, seconds=time.monotonic() - start_s)
            except Exception as error:
                results[place] = _failed(blank, error, time.monotonic() - start_s)
            write(results[place], folder)  # before the next one, which a kill may interrupt
    return results


def _failed(blank: CellResult, error: Exception, seconds: float) -> CellResult:
    reason = str(error) if isinstance(error, EdgeFLError) else f"{type(error).__name__}: {error}"
    return msgspec.structs.replace(blank, failure=reason, seconds=seconds)


def write(result: CellResult, folder: Path) -> None:
    """Store a result. Raises RunError if it cannot be written."""
    content = msgspec.json.format(msgspec.json.encode(result))
    atomic.save(_path(folder, result.key, "json"), content, "the comparison stops")


def read(cell: Cell, folder: Path) -> CellResult | None:
    """Read a stored result; None if the cell has not been run to its end. Raises InputError for a damaged file."""
    path = _path(folder, cell.key, "json")
    try:
        result = msgspec.json.decode(path.read_bytes(), type=CellResult)
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise InputError(
            f"{text(folder)}: not a folder; expected one for the cells of a comparison"
        ) from error
    except (OSError, *NOT_JSON) as error:
        raise InputError(
            f"{text(path)}: cannot be read ({error}); remove it to run that cell again"
        ) from error
    return msgspec.structs.replace(result, label=cell.label)


def read_probe(key: str, folder: Path) -> FeatureProbe | None:
    """Read the features stored with a cell, if any."""
    path = _path(folder, key, "npz")
    if not path.is_file():
        return None
    stored: dict[str, Any] = dict(npz.read(path))
    return FeatureProbe(**{**stored, "clients": tuple(map(str, stored["clients"]))})


class _Rounds:
    """The rounds of studies that share them, and the end of each."""

    def __init__(self, studies: Sequence[Study], watch: Watch) -> None:
        self._studies, self._watch = studies, watch
        self._setups = [execution.of_study(study) for study in studies]
        self._clients = _TimedClients(simulated_clients(self._setups[0]))
        self._curve = _CurveRecorder(self._clients)
        hooks = execution.measuring(self._setups[0], self._curve)
        self._training = execution.train(self._setups[0], self._clients, hooks, watch)
        if self._training.exhausted:  # a cell with fewer rounds than the others is not comparable
            raise self._training.exhausted
        self._personal = dict(self._clients.personal_state()) if len(studies) > 1 else {}

    def finished(self, place: int, blank: CellResult, folder: Path) -> CellResult:
        """The result of one of the studies: its final personalisation from the state after the rounds."""
        setup, clients = self._setups[place], self._clients
        clients.restore(iter(self._personal.items()))
        features = _FeatureRecorder(blank.key, folder, self._studies[place])
        hooks = execution.measuring(setup, features)
        outcome = execution.finish(setup, clients, hooks, self._training, self._watch)
        reports, best = outcome.reports(), outcome.best_by_validation()
        trained = [report for id, report in reports.items() if id in self._training.trained]
        return msgspec.structs.replace(
            blank,
            engine=clients.engine,
            curve=self._curve.points,
            final_seconds=clients.mean_seconds(),
            last=outcome.last(),
            participants=summarise_reports(trained),
            best_round=best[0] if best else 0,
            best=best[1] if best else {},
            clients={id: dict(report) for id, report in reports.items()},
            highest=self._curve.highest,
        )


class _TimedClients(WrappedClients):
    """Clients whose last update or final personalisation is timed in processor time."""

    def __init__(self, clients: Clients) -> None:
        super().__init__(clients)
        self._seconds: list[float] = []

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        if step in MEASURES or not downs:  # without training the time stays that of the last update
            yield from self._clients.each(step, round, method, downs)
            return
        self._seconds = []
        for update in self._clients.each(step, round, method, downs):
            self._seconds.append(update.seconds)
            yield update

    def mean_seconds(self) -> float:
        """Mean over the clients of the last step; 0 if not measured."""
        return fmean(self._seconds) if self._seconds else 0.0


class _CurveRecorder(RunHooks):
    """Record the learning curve of a cell, and each client's highest accuracies."""

    def __init__(self, timed: _TimedClients) -> None:
        self._timed = timed
        self.points: list[Point] = []
        self.highest: dict[str, dict[str, float]] = {}

    def after_round(self, result: RoundResult, clients: Clients) -> None:
        summaries = summarise_reports(list(result.metrics.values()))
        for client, report in result.metrics.items():
            known = self.highest.setdefault(client, {})
            known |= {
                name: max(value, known.get(name, 0.0))
                for name, value in report.items()
                if metrics.TEST_ACCURACY in name
            }
        self.points.append(
            Point(
                round=result.round,
                seconds=result.seconds,
                bytes_down=result.bytes_down,
                bytes_up=result.bytes_up,
                clients=len(result.responded),
                means={name: value.mean for name, value in summaries.items()},
                weighted={
                    name: value.weighted_mean for name, value in summaries.items() if metrics.ACCURACY in name
                },
                device_seconds=self._timed.mean_seconds(),
            )
        )


class _FeatureRecorder(RunHooks):
    """Store features of test images at the end of a cell."""

    def __init__(self, key: str, folder: Path, study: Study) -> None:
        self._key, self._folder, self._study = key, folder, study

    def after_final(self, result: FinalResult, clients: Clients) -> None:
        personal, data = clients.personal_state(), self._study.data()
        device = torch_device(self._study.recipe.device)
        features = probe(result.method, result.shared, personal, data, device)
        _write_probe(features, self._key, self._folder)


def _write_probe(probe: FeatureProbe, key: str, folder: Path) -> None:
    arrays = {name: np.array(value) for name, value in vars(probe).items() if value is not None}
    path = _path(folder, key, "npz")
    path.parent.mkdir(parents=True, exist_ok=True)
    npz.write(path, arrays)


def _path(folder: Path, key: str, ending: str) -> Path:
    return folder / "cells" / f"{key}.{ending}"


@lru_cache(maxsize=1)
def _dataset(name: str, data_dir: Path) -> Dataset:
    """Load a dataset, keeping the last one: cells are ordered by dataset."""
    return datasets.load(name, data_dir)


def inputs_of(study: Study) -> dict[str, str]:
    """Hash or version of each input by its name."""
    recipe = study.recipe
    method, model = recipe.method.name, recipe.model.name
    found = methods.find(method)
    tuning = [FineTuned.__module__] if method.endswith("+ft") else []
    return {
        f"data of {study.dataset.name}": _data(study.dataset),
        f"split of {study.dataset.name}": study.split.fingerprint(),
        f"source of method {method}": _source_now(found.__module__, *tuning),
        f"source of model {model}": _source_now(*_modules_of_model(recipe.model)),
        **({f"weights of model {model}": study.spec.model.weights} if study.spec.model.weights else {}),
        **{f"source of head {name}": _source(heads.resolve(name).__module__) for name in recipe.heads},
        "source of edge_fl": _framework(),
        "engine": f"{recipe.engine} on {torch_device(recipe.device)}",
        **{f"version of {library}": version(library) for library in LIBRARIES},
    }


def changed_inputs(stored: Mapping[str, str], today: Mapping[str, str]) -> list[str]:
    """The reasons for running a cell again; empty if its inputs are the same."""
    if not stored:
        return ["stored without its inputs"]
    return [f"{name} changed" for name in {**today, **stored} if stored.get(name) != today.get(name)]


@lru_cache(maxsize=1)
def _data(dataset: Dataset) -> str:
    return dataset.fingerprint()


def _source_now(*names: str) -> str:
    """As `_source`; a notebook's code in memory changes, so it is read each time."""
    if plugins.MAIN not in names:
        return _source(*names)
    return _hash(_imported(names).values(), main_source.cells())


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
    trained = () if model.train == "all" else (frozen.__name__,)
    if backbones.is_backbone(model.name):
        return backbones.__name__, *trained
    own = plugins.is_own(model.name)
    return plugins.module_of(model.name) if own else models.MODELS[model.name].__module__, *trained


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
