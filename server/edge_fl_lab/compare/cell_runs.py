"""One cell of a comparison: run it, measure it, and store the result, so that an interrupted comparison can be resumed.

FOLDER/cells/<key>.json    the result, or the reason of the failure
FOLDER/cells/<key>.npz     features of test images, for plots
"""

import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn

from edge_fl.console.progress import Watch, unwatched
from edge_fl.data import datasets, npz
from edge_fl.data.samples import Dataset
from edge_fl.errors import EdgeFLError, InputError, RunError
from edge_fl.files import atomic
from edge_fl.files.paths import text
from edge_fl.learn.aggregation.mean import Update
from edge_fl.methods.contract.method import Method
from edge_fl.metrics import Summary, summarise_reports
from edge_fl.untrusted import NOT_JSON
from edge_fl_lab.compare import inputs
from edge_fl_lab.compare.grid import Cell
from edge_fl_lab.features import FeatureProbe, probe
from edge_fl_server.orchestrate import execution
from edge_fl_server.orchestrate.execution import execute, simulated_clients, torch_device
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.training import studies
from edge_fl_server.training.clients import MEASURES, Clients, Downs, Step, WrappedClients
from edge_fl_server.training.engines.processes import threads
from edge_fl_server.training.rounds import FinalResult, RoundResult, RunHooks
from edge_fl_server.training.studies import Study


class Point(Struct, frozen=True, forbid_unknown_fields=True):
    """One round: duration, tensor bytes and size of the cohort, means over clients of the metrics evaluated.

    `device_seconds` is the mean processor time of a client's local update, without evaluation; 0: not measured.
    """

    round: int
    seconds: float
    bytes_down: int
    bytes_up: int
    clients: int
    means: dict[str, float] = {}
    device_seconds: float = 0.0


class CellResult(Struct, frozen=True):
    """The result of one cell; after a `failure` there are no numbers.

    `last` is over all clients after the last round and the final personalisation, `participants` over those that took part in any round,
    `best` over all clients after `best_round`, the best by validation (0: none). `clients` holds the metrics by client. `inputs` is what
    the numbers depend on apart from the recipe (`edge_fl_lab.compare.inputs`), `engine` the engine that ran. `final_seconds` is the
    mean processor time of a client's final personalisation.
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


def prepare(cell: Cell) -> Study:
    """Load the data of a cell and split them. Raises DataError."""
    recipe = cell.recipe
    if recipe.engine == "auto" and torch_device(recipe.device) == "cpu":
        # Cells already run in parallel, and one engine for all gives the same bits for any number of jobs.
        recipe = msgspec.structs.replace(recipe, engine="sequential")
    dataset = _dataset(recipe.data.dataset, Path(recipe.data.data_dir))
    return studies.of_dataset(recipe, dataset)


def run(cell: Cell, folder: Path, commit: str = "", watch: Watch = unwatched) -> CellResult:
    """Run a cell in one thread and store its result. A failed run is a result too; only a failed write raises RunError."""
    start_s = time.monotonic()
    blank = CellResult(cell.key, cell.label, cell.recipe, commit)
    try:
        study = prepare(cell)
        blank = msgspec.structs.replace(blank, inputs=inputs.of_study(study))
        # Sums depend on the number of threads, and a table must not depend on the number of concurrent cells.
        with threads(1), threadpool_limits(1):
            result = _run(blank, study, folder, watch)
    except Exception as error:
        reason = str(error) if isinstance(error, EdgeFLError) else f"{type(error).__name__}: {error}"
        result = msgspec.structs.replace(blank, failure=reason)
    result = msgspec.structs.replace(result, seconds=time.monotonic() - start_s)
    write(result, folder)
    return result


def write(result: CellResult, folder: Path) -> None:
    """Store a result. Raises RunError if it cannot be written."""
    path = _path(folder, result.key, "json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, msgspec.json.format(msgspec.json.encode(result)))
    except OSError as error:
        raise RunError(f"{text(path)}: cannot be written ({error.strerror}); the comparison stops") from error


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


def _run(blank: CellResult, study: Study, folder: Path, watch: Watch) -> CellResult:
    setup = execution.of_study(study)
    clients = _TimedClients(simulated_clients(setup))
    recorder = _CellRecorder(blank.key, folder, study, clients)
    outcome = execute(setup, clients, recorder, watch)
    if outcome.exhausted:  # a cell with fewer rounds than the others is not comparable
        raise outcome.exhausted
    reports, best = outcome.reports(), outcome.best_by_validation()
    return msgspec.structs.replace(
        blank,
        engine=recorder.engine,
        curve=recorder.curve,
        final_seconds=clients.mean_seconds(),
        last=outcome.last(),
        participants=summarise_reports(
            [report for id, report in reports.items() if id in recorder.participants]
        ),
        best_round=best[0] if best else 0,
        best=best[1] if best else {},
        clients={id: dict(report) for id, report in reports.items()},
    )


class _TimedClients(WrappedClients):
    """Clients whose last step, evaluation apart, is timed in processor time."""

    def __init__(self, clients: Clients) -> None:
        super().__init__(clients)
        self._seconds: list[float] = []

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        if step in MEASURES:
            yield from self._clients.each(step, round, method, downs)
            return
        self._seconds = []
        for update in self._clients.each(step, round, method, downs):
            self._seconds.append(update.seconds)
            yield update

    def mean_seconds(self) -> float:
        """Mean over the clients of the last step; 0 if not measured."""
        return fmean(self._seconds) if self._seconds else 0.0


class _CellRecorder(RunHooks):
    """Record the learning curve and participants of a cell, and features of test images at its end."""

    def __init__(self, key: str, folder: Path, study: Study, timed: _TimedClients) -> None:
        self._key, self._folder, self._study, self._timed = key, folder, study, timed
        self.engine = ""
        self.curve: list[Point] = []
        self.participants: set[str] = set()

    def after_round(self, result: RoundResult, clients: Clients) -> None:
        self.participants.update(result.responded)
        summaries = summarise_reports(list(result.metrics.values()))
        self.curve.append(
            Point(
                round=result.round,
                seconds=result.seconds,
                bytes_down=result.bytes_down,
                bytes_up=result.bytes_up,
                clients=len(result.responded),
                means={name: value.mean for name, value in summaries.items()},
                device_seconds=self._timed.mean_seconds(),
            )
        )

    def after_final(self, result: FinalResult, clients: Clients) -> None:
        self.engine = clients.engine
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
