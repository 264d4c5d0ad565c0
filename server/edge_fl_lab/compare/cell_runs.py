"""One cell of a comparison: run it, measure it, and store the result, so that an interrupted comparison can be resumed.

FOLDER/cells/<key>-<inputs>.json    the result, or the reason of the failure
FOLDER/cells/<key>-<inputs>.npz     features of test images, for plots

A result counts only with the inputs of today: data, split, source code (`sources`), engine, versions. Otherwise the cell is run again, and
its earlier results are kept, the last VERSIONS of them.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn

from edge_fl import heads, methods, metrics
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
from edge_fl.untrusted import NOT_JSON
from edge_fl_lab.compare import sources
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
VERSIONS = 4
"""Results that are kept of one cell, each with other inputs: a method that is as it was before finds its cells again."""


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
    """Store a result, and remove the oldest of its cell beyond VERSIONS. Raises RunError if it cannot be written."""
    content = msgspec.json.format(msgspec.json.encode(result))
    atomic.save(_path(folder, result, "json"), content, "the comparison stops")
    for path in _stored(folder, result.key)[VERSIONS:]:
        path.with_suffix(".npz").unlink(missing_ok=True)
        path.unlink(missing_ok=True)


def read(cell: Cell, folder: Path, inputs: Mapping[str, str] | None = None) -> CellResult | None:
    """Read the stored result with these inputs, otherwise the newest; None if the cell has not been run to its end.

    Raises InputError for a damaged file.
    """
    newest = None
    for path in _stored(folder, cell.key):
        result = msgspec.structs.replace(_read(path), label=cell.label)
        if inputs is None or not changed_inputs(result.inputs, inputs):
            return result
        newest = newest or result
    return newest


def read_probe(result: CellResult, folder: Path) -> FeatureProbe | None:
    """Read the features stored with a result, if any."""
    if not (path := _path(folder, result, "npz")).is_file():
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
        features = _FeatureRecorder(_path(folder, blank, "npz"), self._studies[place])
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


def _stored(folder: Path, key: str) -> list[Path]:
    """The results of a cell, newest first."""
    cells = folder / "cells"
    try:
        names = [entry for entry in cells.iterdir() if entry.suffix == ".json"]
    except FileNotFoundError:
        return []
    except NotADirectoryError as error:
        raise InputError(
            f"{text(folder)}: not a folder; expected one for the cells of a comparison"
        ) from error
    except OSError as error:
        raise InputError(
            f"{text(cells)}: cannot be read ({error}); expected a folder with the cells of a comparison"
        ) from error
    found = [path for path in names if path.name.startswith(f"{key}-")]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def _read(path: Path) -> CellResult:
    try:
        return msgspec.json.decode(path.read_bytes(), type=CellResult)
    except (OSError, *NOT_JSON) as error:
        raise InputError(
            f"{text(path)}: cannot be read ({error}); remove it to run that cell again"
        ) from error


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

    def __init__(self, path: Path, study: Study) -> None:
        self._path, self._study = path, study

    def after_final(self, result: FinalResult, clients: Clients) -> None:
        personal, data = clients.personal_state(), self._study.data()
        device = torch_device(self._study.recipe.device)
        features = probe(result.method, result.shared, personal, data, device)
        _write_probe(features, self._path)


def _write_probe(probe: FeatureProbe, path: Path) -> None:
    arrays = {name: np.array(value) for name, value in vars(probe).items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    npz.write(path, arrays)


def _path(folder: Path, result: CellResult, ending: str) -> Path:
    inputs = msgspec.json.encode(result.inputs, order="sorted")
    short = hashlib.blake2b(inputs, digest_size=4).hexdigest()
    return folder / "cells" / f"{result.key}-{short}.{ending}"


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
        f"source of method {method}": sources.of_modules(found.__module__, *tuning),
        f"source of model {model}": sources.of_modules(*sources.modules_of_model(recipe.model)),
        **({f"weights of model {model}": study.spec.model.weights} if study.spec.model.weights else {}),
        **{
            f"source of head {name}": sources.of_modules(heads.resolve(name).__module__)
            for name in recipe.heads
        },
        "source of edge_fl": sources.of_framework(),
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
