"""The pool: one-thread processes, each training whole clients. On a CPU this is the fastest engine for convolutions.

Where a client's step runs: `worker.Worker.run`, with the same `Client` as in the sequential fleet. All workers map the images from one
file, broadcasts and updates pass as safetensors, and personal parts are one file per client.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from edge_fl.config import TaskSpec
from edge_fl.data.partition import Split
from edge_fl.data.samples import Samples
from edge_fl.errors import RunError
from edge_fl.learn.mean import Update
from edge_fl.learn.tree import Parts, leaves, to_arrays
from edge_fl.methods import build_method
from edge_fl.methods.method import Method
from edge_fl.wire import tensors
from server.fleets import worker
from server.fleets.fleet import ClientId, Downs
from server.fleets.personal import Personal
from server.fleets.worker import Done, Job, Step

AHEAD = 2  # clients under way per worker: workers stay busy and memory stays bounded
TRIES = 3  # how often the work of a worker that died is given to a new one


class PoolFleet:
    """The clients of a split, trained by `workers` processes (0: one per core). A context manager; `close` ends the processes."""

    def __init__(self, spec: TaskSpec, samples: Samples, split: Split, *, workers: int = 0) -> None:
        self._clients, self._workers = split.clients, workers or len(os.sched_getaffinity(0))
        self._scratch = tempfile.TemporaryDirectory(prefix="edge-fl-pool-")
        self._folder = Path(self._scratch.name)
        np.save(self._folder / worker.X, samples.x)
        np.save(self._folder / worker.Y, samples.y)
        split.save(self._folder / worker.SPLIT)
        self._personal = Personal(build_method(spec), self._folder / worker.PERSONAL)
        self._spec = spec
        self._pool = self._new_pool()

    def clients(self) -> Sequence[ClientId]:
        return self._clients

    def train(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        return self._spread("train", round, downs)

    def personalise(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        return self._spread("personalise", round, downs)

    def evaluate(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        return self._spread("evaluate", round, downs)

    def personal_state(self) -> Iterator[tuple[ClientId, Parts]]:
        return self._personal.everything(self._clients)

    def restore(self, states: Iterable[tuple[ClientId, Parts]]) -> None:
        self._personal.restore(states)

    def close(self) -> None:
        """Ends the workers and removes their files."""
        self._pool.shutdown(cancel_futures=True)
        self._scratch.cleanup()

    def __enter__(self) -> PoolFleet:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()

    def _spread(self, step: Step, round: int, downs: Downs) -> Iterator[Update]:
        """Updates as they come, with a bounded number of clients under way; the work of a worker that died is done again."""
        jobs = self._jobs(step, round, downs)
        running: dict[Future[Done], tuple[Job, int]] = {}
        while True:
            while len(running) < AHEAD * self._workers and (job := next(jobs, None)):
                running[self._submit(job)] = (job, 1)
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, tries = running.pop(future)
                try:
                    yield future.result().update()
                except BrokenProcessPool as error:
                    if tries == TRIES:
                        message = f"round {round}, client {job.client}: its worker died {TRIES} times ({error}); the run stops"
                        raise RunError(message) from error
                    running[self._submit(job)] = (job, tries + 1)
        for path in self._folder.glob(f"down-{step}-{round}-*"):
            path.unlink()

    def _submit(self, job: Job) -> Future[Done]:
        try:
            return self._pool.submit(worker.work, job)
        except BrokenProcessPool:
            self._pool.shutdown(wait=False)
            self._pool = self._new_pool()
            return self._pool.submit(worker.work, job)

    def _jobs(self, step: Step, round: int, downs: Downs) -> Iterator[Job]:
        """Jobs in the cohort's order; a broadcast that is the same as the one before is not written again."""
        written: Parts | None = None
        path = self._folder
        for number, client in enumerate(downs):
            down = downs[client]
            if written is None or not _identical(down, written):
                path = self._folder / f"down-{step}-{round}-{number}.safetensors"
                path.write_bytes(tensors.pack(to_arrays(down)))
                written = down
            yield Job(step, round, client, path)

    def _new_pool(self) -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        arguments = (self._spec, self._folder)
        return ProcessPoolExecutor(self._workers, mp_context=context, initializer=worker.start, initargs=arguments)


def _identical(a: Parts, b: Parts) -> bool:
    """Whether two broadcasts hold the very same tensors."""
    left, right = leaves(a), leaves(b)
    return left.keys() == right.keys() and all(tensor is right[path] for path, tensor in left.items())
