"""The pool: one-thread processes, each training whole clients. On a CPU this is the fastest engine for convolutions.

Where a client's step runs: `worker.work`, in the worker processes of this program (`processes`). All of them map the images from one
file; personal parts are one file per client beside it, broadcasts and updates are files in memory where the system offers that.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from edge_fl.errors import RunError
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts, to_arrays
from edge_fl.methods import build_method
from edge_fl.methods.contract.method import Method
from edge_fl.wire import tensors
from server.training.client_store import ClientStore
from server.training.engines import processes, schedule, worker
from server.training.engines.folders import make, until_gone
from server.training.engines.personal import PersonalParts
from server.training.engines.simulated import SimulatedFleet
from server.training.engines.worker import Done, Job
from server.training.fleet import Downs, Step

AHEAD = 2  # clients under way per worker: workers stay busy and memory stays bounded
TRIES = 3  # how often the work of a worker that died is given to a new one
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_BYTES = 4 * schedule.WAITING_BYTES  # what must be free there to be used
SILENCE_S = 3600.0  # a run ends when no client has finished for so long


class PoolFleet(SimulatedFleet):
    """The clients of a store, trained by `workers` processes (0: one per core). Its files go when it goes."""

    def __init__(self, store: ClientStore, *, workers: int = 0) -> None:
        self._store, self._workers = store, workers or processes.cores()
        self._folder = until_gone(self, make())
        self._travelling = until_gone(self, make(_in_memory()))
        store.save(self._folder)
        personal = PersonalParts(build_method(store.settings.spec), self._folder / worker.PERSONAL)
        super().__init__(store.settings.clients, personal)

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """Updates as they come, with a bounded number of clients under way; the work of a worker that died is done again."""
        with processes.threads(1):  # whoever takes the updates works beside workers that have all cores
            yield from self._finished(step, round, downs)
        for path in self._travelling.glob(f"down-{step}-{round}-*"):
            path.unlink()

    def _finished(self, step: Step, round: int, downs: Downs) -> Iterator[Update]:
        jobs = self._jobs(step, round, downs)
        running: dict[Future[Done], tuple[Job, int]] = {}
        while True:
            while len(running) < AHEAD * self._workers and (job := next(jobs, None)):
                running[self._submit(job)] = (job, 1)
            if not running:
                break
            finished = wait(running, SILENCE_S, FIRST_COMPLETED).done
            if not finished:
                raise RunError(f"round {round}: no client has finished for {SILENCE_S:.0f} s; the run stops")
            for future in finished:
                job, tries = running.pop(future)
                try:
                    yield worker.collect(job, future.result(), self.personal)
                except BrokenProcessPool as error:
                    if tries == TRIES:
                        message = f"round {round}, client {job.client}: its worker died {TRIES} times ({error}); the run stops"
                        raise RunError(message) from error
                    running[self._submit(job)] = (job, tries + 1)

    def _submit(self, job: Job) -> Future[Done]:
        try:
            return processes.pool(self._workers).submit(worker.work, job)
        except BrokenProcessPool:
            processes.forget(self._workers)
            return processes.pool(self._workers).submit(worker.work, job)

    def _jobs(self, step: Step, round: int, downs: Downs) -> Iterator[Job]:
        """Jobs, the longest first; a broadcast that is the same as the one before is not written again."""
        written: Parts | None = None
        path = self._travelling
        for number, client in enumerate(schedule.largest_first(downs, self._store.samples)):
            down = downs[client]
            if written is None or not schedule.identical(down, written):
                path = self._travelling / f"down-{step}-{round}-{number}.safetensors"
                path.write_bytes(tensors.pack(to_arrays(down)))
                written = down
            up = self._travelling / f"up-{client}.safetensors"
            own = self._folder / f"own-{client}.safetensors"
            yield Job(self._folder, step, round, client, path, up, own)


def _in_memory() -> Path | None:
    """Where files are memory, if there is enough of it; a container often has next to none."""
    enough = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free >= LEAST_SHARED_BYTES
    return SHARED_MEMORY if enough else None
