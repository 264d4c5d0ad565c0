"""The pool: one-thread processes, each training whole clients. On a CPU this is the fastest engine for convolutions.

Where a client's step runs: `worker.work`, in the worker processes of this program (`processes`). All of them map the images from one
file; broadcasts and updates are files of the same folder, and personal parts are one file per client.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from edge_fl.errors import RunError
from edge_fl.learn.mean import Update
from edge_fl.learn.tree import Parts, to_arrays
from edge_fl.methods import build_method
from edge_fl.methods.method import Method
from edge_fl.wire import tensors
from server.fleets import processes, schedule, worker
from server.fleets.fleet import ClientId, Downs
from server.fleets.personal import Personal
from server.fleets.sequential import Step
from server.fleets.site import Site
from server.fleets.worker import Done, Job

AHEAD = 2  # clients under way per worker: workers stay busy and memory stays bounded
TRIES = 3  # how often the work of a worker that died is given to a new one
SILENCE_S = 3600.0  # a run ends when no client has finished for so long


class PoolFleet:
    """The clients of a site, trained by `workers` processes (0: one per core). Its files go when it goes."""

    def __init__(self, site: Site, *, workers: int = 0) -> None:
        self._site, self._workers = site, workers or processes.cores()
        self._folder = Path(tempfile.mkdtemp(prefix="edge-fl-pool-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        site.save(self._folder)
        self._personal = Personal(build_method(site.settings.spec), self._folder / worker.PERSONAL)

    def clients(self) -> Sequence[ClientId]:
        return self._site.settings.clients

    def train(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        return self._spread("train", round, downs)

    def personalise(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        return self._spread("personalise", round, downs)

    def evaluate(self, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        return self._spread("evaluate", round, downs)

    def personal_state(self) -> Iterator[tuple[ClientId, Parts]]:
        return self._personal.everything(self.clients())

    def restore(self, states: Iterable[tuple[ClientId, Parts]]) -> None:
        self._personal.restore(states)

    def _spread(self, step: Step, round: int, downs: Downs) -> Iterator[Update]:
        """Updates as they come, with a bounded number of clients under way; the work of a worker that died is done again."""
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
                    yield worker.collect(job, future.result(), self._personal)
                except BrokenProcessPool as error:
                    if tries == TRIES:
                        message = f"round {round}, client {job.client}: its worker died {TRIES} times ({error}); the run stops"
                        raise RunError(message) from error
                    running[self._submit(job)] = (job, tries + 1)
        for path in self._folder.glob(f"down-{step}-{round}-*"):
            path.unlink()

    def _submit(self, job: Job) -> Future[Done]:
        try:
            return processes.pool(self._workers).submit(worker.work, job)
        except BrokenProcessPool:
            processes.forget(self._workers)
            return processes.pool(self._workers).submit(worker.work, job)

    def _jobs(self, step: Step, round: int, downs: Downs) -> Iterator[Job]:
        """Jobs, the longest first; a broadcast that is the same as the one before is not written again."""
        written: Parts | None = None
        path = self._folder
        for number, client in enumerate(schedule.largest_first(downs, self._site.samples)):
            down = downs[client]
            if written is None or not schedule.identical(down, written):
                path = self._folder / f"down-{step}-{round}-{number}.safetensors"
                path.write_bytes(tensors.pack(to_arrays(down)))
                written = down
            up, own = (self._folder / f"{what}-{client}.safetensors" for what in ("up", "own"))
            yield Job(self._folder, step, round, client, path, up, own)
