"""Run a comparison: execute the missing cells, then write the tables.

FOLDER/cells/                                the results of each cell, see `cell_runs`
FOLDER/table.txt, .md, .tex, .csv, .json
FOLDER/curves.csv                            accuracy, bytes and processor time after each round of each cell
FOLDER/paper.txt, .md, .tex, .csv            comparison with the paper's figures, on request

With several jobs cells run in child processes with one thread each; a child that dies fails only its own cell. Children send their progress
through one shared pipe. It needs no lock, which a dying child could leave locked: each message is short enough to be written atomically.
"""

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Any, Self

import msgspec

import edge_fl
from edge_fl import metrics, threads
from edge_fl.console import progress, units
from edge_fl.console import tables as renderers
from edge_fl.console.output import print_status
from edge_fl.console.progress import Count, Watch, unwatched
from edge_fl.console.tables import Table
from edge_fl.data import partition
from edge_fl.data.partition import DataConfig
from edge_fl.files import atomic, paths
from edge_fl_lab.compare import cell_runs, summary
from edge_fl_lab.compare import estimate as estimates
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.estimate import Estimate
from edge_fl_lab.compare.grid import Cell, trainings
from edge_fl_lab.compare.summary import MethodRow
from edge_fl_lab.compare.tables import TunedRow
from edge_fl_server.orchestrate import execution
from edge_fl_server.runs.results import commit
from edge_fl_server.training.engines.processes import ONE_THREAD, Spawn, death, end_with_parent, environment

Done = Callable[[CellResult], None]
KEPT = "the cells are kept"
DIED = "its process {}; the next call runs this cell again"
LONG_S = 30.0  # a comparison that takes longer says how long before it starts
MAX_STAGE = 300  # characters: POSIX systems write up to 512 bytes atomically

_parent: Any = None  # in a child: the pipe to its parent


def run(cells: Sequence[Cell], folder: Path, jobs: int = 1, *, retry: bool = False) -> dict[str, CellResult]:
    """Return every cell's result by key, stored or new; cells whose inputs changed are run again, with `retry` failed ones too.

    Raises InputError before anything runs if any cell has no data, no valid method or no model.
    """
    results, todo, stored = _stored(cells, folder, retry=retry)
    with progress.Progress() as shown:
        expected = estimates.of_cells(todo, stored, shown)
    if expected.seconds(jobs) >= LONG_S:
        print_status(expected.text(jobs))
    with CellProgress(todo, len(results), jobs, expected.cells) as progress_of_cells:

        def done(result: CellResult) -> None:
            results[result.key] = result
            progress_of_cells.done(result)

        run_all(todo, folder, jobs, _commit(), done, progress_of_cells)
    return results


def estimate(cells: Sequence[Cell], folder: Path, *, retry: bool = False) -> Estimate:
    """How long `run` would take. Raises InputError as `run`."""
    _, todo, stored = _stored(cells, folder, retry=retry)
    with progress.Progress() as shown:
        return estimates.of_cells(todo, stored, shown)


def _stored(
    cells: Sequence[Cell], folder: Path, *, retry: bool
) -> tuple[dict[str, CellResult], list[Cell], list[CellResult]]:
    """The results that count by key, the cells to run, and all results that are stored; says where they come from and what changed."""
    unique = {cell.key: cell for cell in cells}
    found = check(list(unique.values()))
    stored = {
        key: result for key, cell in unique.items() if (result := cell_runs.read(cell, folder, found[key]))
    }
    changes = {key: cell_runs.changed_inputs(result.inputs, found[key]) for key, result in stored.items()}
    results = {
        key: result for key, result in stored.items() if not changes[key] and not (retry and result.failure)
    }
    for reason, count in Counter(reason for reasons in changes.values() for reason in reasons).items():
        print_status(f"rerun of {units.counted(count, 'cell')}: {reason}")
    if results:
        newest = {key: cell_runs.read(unique[key], folder) for key in results}
        back = sum(each is not None and each.inputs != results[key].inputs for key, each in newest.items())
        print_status(
            f"{units.counted(len(results), 'cell')} taken from {paths.text(folder / 'cells')}"
            + f", {back} from before a change that was undone" * bool(back)
        )
    return results, [cell for key, cell in unique.items() if key not in results], list(stored.values())


def check(cells: Sequence[Cell]) -> dict[str, dict[str, str]]:
    """Load every dataset, draw every split, build every method -> the inputs of each cell. Raises InputError."""
    found, built, gaps = {}, set(), set()
    for cell in cells:
        study = cell_runs.prepare(cell)
        gaps.update(partition.gaps(study.dataset, study.split))
        settings = msgspec.structs.replace(cell.recipe, seed=0, data=DataConfig())
        kind = msgspec.json.encode([settings, study.dataset.input, study.dataset.classes])
        if kind not in built:  # seeds and splits make no difference
            execution.of_study(study)
            built.add(kind)
        found[cell.key] = cell_runs.inputs_of(study)
    for line in sorted(gaps):
        print_status(line)
    return found


def text(tables: Sequence[Table], ending: str = "txt") -> str:
    """Format several tables as one file."""
    return "\n".join(renderers.RENDERERS[ending](table) for table in tables)


def save(folder: Path, name: str, tables: Sequence[Table], records: Sequence[Mapping[str, object]]) -> None:
    """Write `name`.txt, .md and .tex from the tables, and .csv from the records. Raises RunError if they cannot be written."""
    for ending in renderers.RENDERERS:
        atomic.save(folder / f"{name}.{ending}", text(tables, ending), KEPT)
    atomic.save(folder / f"{name}.csv", renderers.csv_text(records), KEPT)


def save_rows(
    folder: Path,
    rows: Sequence[MethodRow],
    cells: Sequence[Cell],
    results: Mapping[str, CellResult],
    tuning: Sequence[TunedRow] = (),
) -> Path:
    """Write table.json: every number of every row, and every cell's full recipe, commit, engine and inputs."""
    runs = [
        {
            "method": cell.label,
            "key": cell.key,
            "commit": result.commit,
            "engine": result.engine,
            "inputs": result.inputs,
            "recipe": result.recipe,
        }
        for cell in cells
        if (result := results.get(cell.key))
    ]
    trials = [
        {
            "trials": row.tuning.trials,
            "chosen": row.tuning.chosen,
            "default": row.tuning.default,
            "tuned": row.tuned,
            "untuned": row.untuned,
        }
        for row in tuning
    ]
    tree = {"rows": rows, "cells": runs, **({"tuning": trials} if trials else {})}
    return atomic.save(folder / "table.json", msgspec.json.format(msgspec.json.encode(tree)).decode(), KEPT)


def save_curves(folder: Path, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> Path:
    """Write curves.csv: a line per round of each cell, and a last one for the final personalisation."""
    lines = [
        line for cell in cells if (result := results.get(cell.key)) for line in summary.curve(cell, result)
    ]
    return atomic.save(folder / "curves.csv", renderers.csv_text(lines), KEPT)


def records(table: Table) -> list[dict[str, object]]:
    """A table's rows as dicts by heading."""
    return [dict(zip(table.headings, row, strict=True)) for row in table.rows]


def _commit() -> str:
    state = commit(Path(edge_fl.__file__).parent)
    return f"{state.sha}{'+' * state.dirty}" if state else ""


def run_all(
    todo: Sequence[Cell], folder: Path, jobs: int, commit: str, done: Done, watch: Watch = unwatched
) -> None:
    """Run all cells, `jobs` trainings at a time, and pass each result to `done`; a single job needs no child process.

    `watch` receives the progress of rounds and clients of a cell; with several jobs, the rounds of each cell.
    """
    waiting: list[Sequence[Cell]] = [*trainings(todo)]
    if jobs == 1:
        for cells in waiting:
            for result in cell_runs.run(cells, folder, commit, watch):
                done(result)
        return
    while waiting:
        left, _ = _run_pool(waiting, folder, jobs, commit, done, watch)
        # The pool is broken: the training that broke it is among the first `jobs` unfinished ones. Running each alone identifies it.
        for suspect in left[:jobs]:
            again, how = _run_pool([suspect], folder, 1, commit, done, watch)
            if again:
                watch(_finished(suspect))
                for cell in suspect:
                    done(CellResult(cell.key, cell.label, cell.recipe, commit, failure=DIED.format(how)))
        waiting = left[jobs:]


def _run_pool(
    todo: Sequence[Sequence[Cell]], folder: Path, jobs: int, commit: str, done: Done, watch: Watch
) -> tuple[list[Sequence[Cell]], str]:
    """Run trainings in a pool; returns the unfinished ones, in order, and how a child died, if one did."""
    done_keys: set[str] = set()
    how = ""
    with environment(ONE_THREAD), _progress_pipe(watch) as pipe, _pool(min(jobs, len(todo)), pipe) as pool:
        futures = [pool.submit(_run_here, cells, folder, commit) for cells in todo]
        try:
            for future in as_completed(futures):
                for result in future.result():
                    done_keys.add(result.key)
                    done(result)
        except BrokenProcessPool:
            how = death(pool)
    return [cells for cells in todo if cells[0].key not in done_keys], how


@contextmanager
def _progress_pipe(watch: Watch) -> Iterator[Connection]:
    """A pipe whose messages a thread passes to `watch`."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def listen() -> None:
        while payload := receiver.recv_bytes():
            watch(msgspec.json.decode(payload, type=Count))

    thread = threads.lasting(listen, "edge-fl-cells")
    thread.start()
    try:
        yield sender
    finally:
        sender.send_bytes(b"")
        thread.join()
        receiver.close()
        sender.close()


@contextmanager
def _pool(workers: int, pipe: Connection) -> Iterator[ProcessPoolExecutor]:
    """A pool of spawned processes, all terminated at the end of the block."""
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, mp_context=Spawn(), initializer=_initialise, initargs=(pipe,))
    try:
        yield pool
        pool.shutdown()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()


def _initialise(pipe: Connection) -> None:
    """Initialise a child."""
    global _parent
    _parent = pipe
    end_with_parent()


def _run_here(cells: Sequence[Cell], folder: Path, commit: str) -> list[CellResult]:
    try:
        return cell_runs.run(cells, folder, commit, partial(_send_progress, _stage(cells)))
    finally:
        _parent.send_bytes(msgspec.json.encode(_finished(cells)))  # also after a failure


def _send_progress(stage: str, count: Count) -> None:
    if count.stage == "rounds":
        _parent.send_bytes(msgspec.json.encode(count._replace(stage=stage)))


def _stage(cells: Sequence[Cell]) -> str:
    return str(cells[0])[:MAX_STAGE]


def _finished(cells: Sequence[Cell]) -> Count:
    return Count(_stage(cells), 1, 1)


class CellProgress(progress.Progress):
    """Show the progress of the cells in `todo`, run `jobs` at a time; `kept` cells have stored results.

    `expected` are estimated seconds by key, for methods without a finished cell.
    """

    def __init__(
        self, todo: Sequence[Cell], kept: int, jobs: int, expected: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        self._expected = expected or {}
        self._todo = {cell.key: cell for cell in todo}
        self._kept, self._jobs, self._total = kept, jobs, len(todo)
        self._seconds: dict[str, list[float]] = {}

    def __enter__(self) -> Self:
        super().__enter__()
        self.print(f"{self._total} cells to run, {self._kept} already done")
        self(Count("cells", 0, self._total))
        return self

    def done(self, result: CellResult) -> None:
        """Report a finished or failed cell."""
        cell = self._todo.pop(result.key)
        if not result.failure:
            self._seconds.setdefault(cell.label, []).append(result.seconds)
        ended = self._total - len(self._todo)
        left = f"; {about(self.seconds_left())} left" if self._todo else ""
        self.print(f"[{ended}/{self._total}] {cell}: {_result(result)}{left}")
        self(Count("cells", ended, self._total))

    def seconds_left(self) -> float:
        """Estimate the remaining time from the mean duration of each method; for one without a finished cell, as expected or from all."""
        known = [seconds for of_method in self._seconds.values() for seconds in of_method]
        mean = fmean(known) if known else float("nan")
        left = [max(self._usual(cell, mean) for cell in cells) for cells in trainings(self._todo.values())]
        return sum(left) / min(self._jobs, max(len(left), 1))

    def _usual(self, cell: Cell, mean: float) -> float:
        own = self._seconds.get(cell.label)
        return fmean(own) if own else self._expected.get(cell.key, mean)


def about(seconds: float) -> str:
    """Format an estimated duration: "about 40 s", "about 12 min", "about 3.5 h"."""
    return "unknown time" if seconds != seconds else f"about {units.seconds(seconds, 0)}"


def _result(result: CellResult) -> str:
    if result.failure:
        return f"FAILED, {result.failure}"
    metric = next(
        (name for name in (metrics.PERSONAL_AFTER, metrics.GLOBAL_TEST) if name in result.last), None
    )
    accuracy = f"{metric} {units.percent(result.last[metric].mean)}" if metric else "no accuracy"
    return f"{accuracy} in {result.seconds:.1f} s"
