"""Many cells, some at a time, each in a child process with one thread. A child that dies costs its own cell and no other.

Children tell how far their rounds are through one pipe. It needs no lock, which a child that dies could take with it: what one tells is
short enough to be written at once.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from edge_fl.console.progress import Count, Watch, unwatched
from server.compare import cell as cells
from server.compare.cell import Measured
from server.compare.grid import Cell
from server.training.engines.processes import one_thread_each

Done = Callable[[Measured], None]
DIED = "its process died (out of memory?); it is run again next time"
MAX_STAGE = 300  # characters: any POSIX system writes 512 bytes at once

_parent: Any = None  # in a child, the pipe to the process that started it


def run(
    todo: Sequence[Cell], folder: Path, jobs: int, commit: str, done: Done, watch: Watch = unwatched
) -> None:
    """Runs every cell, `jobs` at a time, and tells `done` of each as it ends. One at a time needs no child process.

    `watch` is told of the rounds and clients inside a cell; of several at a time, of the rounds of each.
    """
    if jobs == 1:
        for cell in todo:
            done(cells.run(cell, folder, commit, watch))
        return
    waiting = list(todo)
    while waiting:
        left = _run_pool(waiting, folder, jobs, commit, done, watch)
        # The pool broke: whoever broke it was among the first `jobs` cells that were left. Alone, each shows whether it was the one.
        for suspect in left[:jobs]:
            if _run_pool([suspect], folder, 1, commit, done, watch):
                watch(_over(suspect))
                done(Measured(suspect.key, suspect.label, suspect.recipe, commit, failure=DIED))
        waiting = left[jobs:]


def _run_pool(
    todo: Sequence[Cell], folder: Path, jobs: int, commit: str, done: Done, watch: Watch
) -> list[Cell]:
    """The cells that were left, in order, when a child died; empty when all went well."""
    finished: set[str] = set()
    with one_thread_each(), _told(watch) as pipe, _pool(min(jobs, len(todo)), pipe) as pool:
        futures = [pool.submit(_run_here, cell, folder, commit) for cell in todo]
        try:
            for future in as_completed(futures):
                measured = future.result()
                finished.add(measured.key)
                done(measured)
        except BrokenProcessPool:
            pass
    return [cell for cell in todo if cell.key not in finished]


@contextmanager
def _told(watch: Watch) -> Iterator[Connection]:
    """The end of a pipe that children tell into; `watch` hears it, on a thread of its own, until the block ends."""
    heard, pipe = multiprocessing.Pipe(duplex=False)

    def listen() -> None:
        while payload := heard.recv_bytes():
            watch(msgspec.json.decode(payload, type=Count))

    thread = threading.Thread(target=listen, name="edge-fl-cells", daemon=True)
    thread.start()
    try:
        yield pipe
    finally:
        pipe.send_bytes(b"")
        thread.join()
        heard.close()
        pipe.close()


@contextmanager
def _pool(workers: int, pipe: Connection) -> Iterator[ProcessPoolExecutor]:
    """A pool of spawned processes that is gone when the block ends, however it ends."""
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(pipe,))
    try:
        yield pool
        pool.shutdown()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()


def _begin(pipe: Connection) -> None:
    """The first thing that a new child does."""
    global _parent
    _parent = pipe


def _run_here(cell: Cell, folder: Path, commit: str) -> Measured:
    try:
        return cells.run(cell, folder, commit, partial(_tell, _stage(cell)))
    finally:
        _parent.send_bytes(msgspec.json.encode(_over(cell)))  # also of one that failed half-way


def _tell(stage: str, count: Count) -> None:
    if count.stage == "rounds":
        _parent.send_bytes(msgspec.json.encode(count._replace(stage=stage)))


def _stage(cell: Cell) -> str:
    return str(cell)[:MAX_STAGE]


def _over(cell: Cell) -> Count:
    return Count(_stage(cell), 1, 1)
