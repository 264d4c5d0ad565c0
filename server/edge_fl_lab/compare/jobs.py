"""Run cells in child processes with one thread each. A child that dies fails only its own cell.

Children send their progress through one shared pipe. It needs no lock, which a dying child could leave locked: each message is short
enough to be written atomically.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from edge_fl import threads
from edge_fl.console.progress import Count, Watch, unwatched
from edge_fl_lab.compare import cell_runs
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.grid import Cell
from edge_fl_server.training.engines.processes import Spawn, death, end_with_parent, one_thread_each

Done = Callable[[CellResult], None]
DIED = "its process {}; the next call runs this cell again"
MAX_STAGE = 300  # characters: POSIX systems write up to 512 bytes atomically

_parent: Any = None  # in a child: the pipe to its parent


def run(
    todo: Sequence[Cell], folder: Path, jobs: int, commit: str, done: Done, watch: Watch = unwatched
) -> None:
    """Run all cells, `jobs` at a time, and pass each result to `done`; a single job needs no child process.

    `watch` receives the progress of rounds and clients of a cell; with several jobs, the rounds of each cell.
    """
    if jobs == 1:
        for cell in todo:
            done(cell_runs.run(cell, folder, commit, watch))
        return
    waiting = list(todo)
    while waiting:
        left, _ = _run_pool(waiting, folder, jobs, commit, done, watch)
        # The pool is broken: the cell that broke it is among the first `jobs` unfinished ones. Running each alone identifies it.
        for suspect in left[:jobs]:
            again, how = _run_pool([suspect], folder, 1, commit, done, watch)
            if again:
                watch(_finished(suspect))
                done(CellResult(suspect.key, suspect.label, suspect.recipe, commit, failure=DIED.format(how)))
        waiting = left[jobs:]


def _run_pool(
    todo: Sequence[Cell], folder: Path, jobs: int, commit: str, done: Done, watch: Watch
) -> tuple[list[Cell], str]:
    """Run cells in a pool; returns the unfinished ones, in order, and how a child died, if one did."""
    done_keys: set[str] = set()
    how = ""
    with one_thread_each(), _progress_pipe(watch) as pipe, _pool(min(jobs, len(todo)), pipe) as pool:
        futures = [pool.submit(_run_here, cell, folder, commit) for cell in todo]
        try:
            for future in as_completed(futures):
                result = future.result()
                done_keys.add(result.key)
                done(result)
        except BrokenProcessPool:
            how = death(pool)
    return [cell for cell in todo if cell.key not in done_keys], how


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


def _run_here(cell: Cell, folder: Path, commit: str) -> CellResult:
    try:
        return cell_runs.run(cell, folder, commit, partial(_send_progress, _stage(cell)))
    finally:
        _parent.send_bytes(msgspec.json.encode(_finished(cell)))  # also after a failure


def _send_progress(stage: str, count: Count) -> None:
    if count.stage == "rounds":
        _parent.send_bytes(msgspec.json.encode(count._replace(stage=stage)))


def _stage(cell: Cell) -> str:
    return str(cell)[:MAX_STAGE]


def _finished(cell: Cell) -> Count:
    return Count(_stage(cell), 1, 1)
