"""One cell of a comparison: run, measured, and kept in one file, so that a comparison that was broken off goes on where it stopped.

FOLDER/cells/<key>.json    what it measured, or why it failed
FOLDER/cells/<key>.npz     features of test images, for the pictures
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn

from edge_fl.config import Recipe
from edge_fl.console.progress import Watch, unwatched
from edge_fl.data import datasets, npz, partition
from edge_fl.data.samples import Array, Dataset
from edge_fl.errors import EdgeFLError, InputError, RunError
from edge_fl.files import atomic
from edge_fl.metrics import Summary, summarise_reports
from server.compare.grid import Cell
from server.orchestrate.execute import RunResult, simulate
from server.orchestrate.setup import torch_device
from server.training.engines.processes import threads
from server.training.features import Probe, probe
from server.training.fleet import Fleet
from server.training.rounds import FinalResult, RoundResult, RunHooks
from server.training.study import Study


class Point(Struct, frozen=True, forbid_unknown_fields=True):
    """One round: seconds, tensor bytes of the whole cohort, clients in it, and the means over clients of what was evaluated."""

    round: int
    seconds: float
    bytes_down: int
    bytes_up: int
    clients: int
    means: dict[str, float] = {}


class Measured(Struct, frozen=True, forbid_unknown_fields=True):
    """What one cell gave; with a `failure`, nothing but that.

    `last` is over all clients after the last round and the closing step, `participants` over those that took part in any round, `best`
    over all clients after `best_round`, the best by validation (0: none). `clients` holds each client's own numbers.
    """

    key: str
    label: str
    recipe: Recipe
    commit: str = ""
    data_hash: str = ""
    failure: str = ""
    seconds: float = 0.0
    curve: list[Point] = []
    last: dict[str, Summary] = {}
    participants: dict[str, Summary] = {}
    best_round: int = 0
    best: dict[str, Summary] = {}
    clients: dict[str, dict[str, float]] = {}


def run(cell: Cell, folder: Path, commit: str = "", watch: Watch = unwatched) -> Measured:
    """Runs a cell in one thread and writes its file. An error of the run is a result too; only the keyboard and the disk get through."""
    started = time.monotonic()
    try:
        # sums depend on the number of threads, and a table should not depend on how many cells ran at a time
        with threads(1), threadpool_limits(1):
            measured = _measure(cell, folder, commit, watch)
    except EdgeFLError as error:
        measured = Measured(cell.key, cell.label, cell.recipe, commit, failure=str(error))
    except Exception as error:
        measured = Measured(
            cell.key, cell.label, cell.recipe, commit, failure=f"{type(error).__name__}: {error}"
        )
    measured = msgspec.structs.replace(measured, seconds=time.monotonic() - started)
    write(measured, folder)
    return measured


def write(measured: Measured, folder: Path) -> None:
    """Keeps a cell. Raises RunError when the disk does not take it."""
    try:
        path = _path(folder, measured.key, "json")
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, msgspec.json.format(msgspec.json.encode(measured)))
    except OSError as error:
        raise RunError(
            f"{folder}: cannot be written to ({error.strerror}); the comparison ends here"
        ) from error


def read(cell: Cell, folder: Path) -> Measured | None:
    """What is kept of a cell; None when it was never run to its end. Raises InputError for a damaged file."""
    path = _path(folder, cell.key, "json")
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Measured)
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise InputError(f"{folder}: no folder; expected one for the cells of a comparison") from error
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}); remove it to run that cell again") from error
    return msgspec.structs.replace(kept, label=cell.label)


def read_probe(key: str, folder: Path) -> Probe | None:
    """The features kept with a cell, if any."""
    path = _path(folder, key, "npz")
    if not path.is_file():
        return None
    found = npz.read(path)
    clients = tuple(map(str, found["clients"]))
    return Probe(found["z"], found["y"], found["client"], clients, found.get("projected"))


def _measure(cell: Cell, folder: Path, commit: str, watch: Watch) -> Measured:
    recipe, device = cell.recipe, torch_device(cell.recipe.device)
    if recipe.engine == "auto" and device == "cpu":
        # cells run side by side already, and so give the same bits however many
        recipe = msgspec.structs.replace(recipe, engine="sequential")
    dataset = _dataset(recipe.data.dataset, Path(recipe.data.data_dir))
    study = Study(recipe, dataset, partition.split_clients(dataset, recipe.data, recipe.seed))
    recorder = _CellRecorder(cell.key, folder, study, device)
    outcome = simulate(study, recorder, watch)
    if outcome.exhausted:  # a cell with fewer rounds than the others is not comparable
        raise outcome.exhausted
    return _summed_up(cell, outcome, recorder.curve, recorder.participants, commit, _fingerprint(dataset))


class _CellRecorder(RunHooks):
    """Record the learning curve and participants of a cell, and features of test images at its end."""

    def __init__(self, key: str, folder: Path, study: Study, device: str) -> None:
        self._key, self._folder, self._study, self._device = key, folder, study, device
        self.curve: list[Point] = []
        self.participants: set[str] = set()

    def after_round(self, result: RoundResult, fleet: Fleet) -> None:
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
            )
        )

    def after_final(self, result: FinalResult, fleet: Fleet) -> None:
        personal, data = fleet.personal_state(), self._study.data()
        found = probe(result.method, result.shared, personal, data, self._device)
        _write_probe(found, self._key, self._folder)


def _summed_up(
    cell: Cell,
    outcome: RunResult,
    curve: list[Point],
    took_part: set[str],
    commit: str,
    data_hash: str,
) -> Measured:
    reports, best = outcome.reports(), outcome.best_by_validation()
    return Measured(
        cell.key,
        cell.label,
        cell.recipe,
        commit,
        data_hash,
        curve=curve,
        last=outcome.last(),
        participants=summarise_reports([report for id, report in reports.items() if id in took_part]),
        best_round=best[0] if best else 0,
        best=best[1] if best else {},
        clients={id: dict(report) for id, report in {**reports, **outcome.unseen}.items()},
    )


def _write_probe(seen: Probe, key: str, folder: Path) -> None:
    arrays: dict[str, Array] = {
        "z": seen.z,
        "y": seen.y,
        "client": seen.client,
        "clients": np.array(seen.clients),
    }
    if seen.projected is not None:
        arrays["projected"] = seen.projected
    path = _path(folder, key, "npz")
    path.parent.mkdir(parents=True, exist_ok=True)
    npz.write(path, arrays)


def _path(folder: Path, key: str, ending: str) -> Path:
    return folder / "cells" / f"{key}.{ending}"


@lru_cache(maxsize=1)
def _dataset(name: str, data_dir: Path) -> Dataset:
    """The last dataset stays in memory: the cells of one follow each other."""
    return datasets.load(name, data_dir)


@lru_cache(maxsize=1)
def _fingerprint(dataset: Dataset) -> str:
    return dataset.samples.fingerprint()
