"""Many cells, some at a time, each in a child process with one thread. A child that dies costs its own cell and no other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from edge_fl.progress import Watch, unwatched
from server.compare import cell as cells
from server.compare.cell import Measured
from server.compare.grid import Cell
from server.fleets.processes import one_thread_each

Done = Callable[[Measured], None]
DIED = "its process died (out of memory?); it is run again next time"


def run(
    todo: Sequence[Cell], folder: Path, jobs: int, commit: str, done: Done, watch: Watch = unwatched
) -> None:
    """Runs every cell, `jobs` at a time, and tells `done` of each as it ends. One at a time needs no child process.

    Then `watch` is told of the rounds and clients inside a cell, too.
    """
    if jobs == 1:
        for cell in todo:
            done(cells.run(cell, folder, commit, watch))
        return
    waiting = list(todo)
    while waiting:
        left = _run_pool(waiting, folder, jobs, commit, done)
        # The pool broke: whoever broke it was among the first `jobs` cells that were left. Alone, each shows whether it was the one.
        for suspect in left[:jobs]:
            if _run_pool([suspect], folder, 1, commit, done):
                done(Measured(suspect.key, suspect.label, suspect.recipe, commit, failure=DIED))
        waiting = left[jobs:]


def _run_pool(todo: Sequence[Cell], folder: Path, jobs: int, commit: str, done: Done) -> list[Cell]:
    """The cells that were left, in order, when a child died; empty when all went well."""
    finished: set[str] = set()
    with one_thread_each(), _pool(min(jobs, len(todo))) as pool:
        futures = [pool.submit(cells.run, cell, folder, commit) for cell in todo]
        try:
            for future in as_completed(futures):
                measured = future.result()
                finished.add(measured.key)
                done(measured)
        except BrokenProcessPool:
            pass
    return [cell for cell in todo if cell.key not in finished]


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of spawned processes that is gone when the block ends, however it ends."""
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
        pool.shutdown()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
