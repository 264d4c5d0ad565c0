"""The pool: processes with one thread each that train whole clients. The fastest engine for convolutions on a CPU.

All workers (`processes`) map the images from one file; personal parts are one file per client; broadcasts and updates are files in shared
memory where available. The pool adopts a worker's output only after the job has finished, so a worker may die at any moment and its job be
repeated.
"""

import mmap
import shutil
import weakref
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from edge_fl.errors import RunError
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts, from_arrays, to_arrays
from edge_fl.methods import build_method
from edge_fl.methods.contract.method import Method
from edge_fl.wire import tensors
from edge_fl_server.training.clients import MEASURES, ClientId, Downs, Step
from edge_fl_server.training.engines import folders, processes, simulated
from edge_fl_server.training.engines.simulated import PersonalParts, SimulatedClients, take_step, with_epochs
from edge_fl_server.training.studies import ClientStore

PERSONAL = "personal"
QUEUED_PER_WORKER = 2  # clients: keeps workers busy and bounds memory
TRIES = 3  # per client, if its worker dies
MIN_SHARED_BYTES = 4 * simulated.WAITING_BYTES  # free space required to use it
TIMEOUT_S = 3600.0  # without a finished client, after which the run stops


@dataclass(frozen=True)
class ClientJob:
    """One client's step: the run's folder, and the files of the broadcast, the update and the personal parts."""

    folder: Path
    step: Step
    round: int
    epochs: int
    client: ClientId
    down: Path
    up: Path
    own: Path


@dataclass(frozen=True)
class Done:
    """The result of a job, in addition to its files."""

    samples: int
    metrics: dict[str, float]
    seconds: float


def work(job: ClientJob) -> Done:
    """Run one client's step."""
    store, method, personal = _run(job.folder)
    now = with_epochs(method.at(max(job.round, 1)), job.epochs)
    update, own = take_step(
        job.step, store[job.client], now, job.round, _down(job.down), personal.get(job.client)
    )
    if job.step not in MEASURES and own:
        job.own.write_bytes(tensors.pack(to_arrays(own)))
    job.up.write_bytes(tensors.pack(to_arrays(update.parts)))
    return Done(update.samples, update.metrics, update.seconds)


def collect(job: ClientJob, done: Done, personal: PersonalParts) -> Update:
    """Store the client's new personal parts and return the update.

    The update's tensors are its mapped file, which is already unlinked and so freed with them.
    """
    if job.own.exists():
        personal.adopt(job.client, job.own)
    with job.up.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    job.up.unlink()
    parts = from_arrays(tensors.unpack(memoryview(mapped)), copy=False)
    return Update(job.client, done.samples, parts, done.metrics, seconds=done.seconds)


@lru_cache(maxsize=1)
def _run(folder: Path) -> tuple[ClientStore, Method, PersonalParts]:
    """Data and method of a run; a process caches those of its last run."""
    store = ClientStore.load(folder)
    method = build_method(store.settings.spec)
    return store, method, PersonalParts(method, folder / PERSONAL)


@lru_cache(maxsize=1)
def _down(path: Path) -> Parts:
    return from_arrays(tensors.unpack(path.read_bytes()))


class PoolClients(SimulatedClients):
    """The clients of a store, trained by `workers` processes (0: one per core). Its files are removed with it."""

    engine = "pool"

    def __init__(self, store: ClientStore, *, workers: int = 0) -> None:
        self._store, self._workers = store, workers or processes.cores()
        self._folder = folders.remove_with(self, folders.create())
        self._messages = folders.remove_with(self, folders.create(_shared_memory()))
        store.save(self._folder)
        personal = PersonalParts(build_method(store.settings.spec), self._folder / PERSONAL)
        super().__init__(store.settings.clients, personal)
        self._unfinished: set[Future[Done]] = set()
        weakref.finalize(self, _end_unfinished, self._unfinished, self._workers)

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """Yield updates in order of completion. The number of queued clients is bounded; the work of a dead worker is repeated."""
        try:
            with processes.threads(1):  # the workers use all cores, also while the caller processes an update
                yield from self._updates(step, round, method.epochs, downs)
        except GeneratorExit:  # the caller has enough updates
            for future in list(self._unfinished):
                future.cancel()
            raise
        except BaseException:  # do not let the program's end wait for running jobs
            processes.end(self._workers)
            raise
        for path in self._messages.glob(f"down-{step}-{round}-*"):
            path.unlink()
        processes.return_memory()  # that of the updates, whose gaps would remain in the heap

    def _updates(self, step: Step, round: int, epochs: int, downs: Downs) -> Iterator[Update]:
        jobs = self._jobs(step, round, epochs, downs)
        running: dict[Future[Done], tuple[ClientJob, int]] = {}
        while True:
            while len(running) < QUEUED_PER_WORKER * self._workers and (job := next(jobs, None)):
                running[self._submit(job)] = (job, 1)
            if not running:
                break
            finished = wait(running, TIMEOUT_S, FIRST_COMPLETED).done
            if not finished:
                raise RunError(f"round {round}: no client finished within {TIMEOUT_S:.0f} s; the run stops")
            for future in finished:
                job, tries = running.pop(future)
                try:
                    yield collect(job, future.result(), self.personal)
                except BrokenProcessPool as error:
                    if tries == TRIES:
                        how = processes.death(processes.pool(self._workers))
                        message = f"round {round}, client {job.client}: its worker died {TRIES} times, at last it {how}; the run stops"
                        raise RunError(message) from error
                    running[self._submit(job)] = (job, tries + 1)

    def _submit(self, job: ClientJob) -> Future[Done]:
        try:
            future = processes.pool(self._workers).submit(work, job)
        except BrokenProcessPool:
            processes.end(self._workers)
            future = processes.pool(self._workers).submit(work, job)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return future

    def _jobs(self, step: Step, round: int, epochs: int, downs: Downs) -> Iterator[ClientJob]:
        """The jobs, largest first; a broadcast identical to the previous one is not written again."""
        written: Parts | None = None
        path = self._messages
        for number, client in enumerate(simulated.largest_first(downs, self._store.samples)):
            down = downs[client]
            if written is None or not simulated.identical(down, written):
                path = self._messages / f"down-{step}-{round}-{number}.safetensors"
                path.write_bytes(tensors.pack(to_arrays(down)))
                written = down
            up = self._messages / f"up-{client}.safetensors"
            own = self._folder / f"own-{client}.safetensors"
            yield ClientJob(self._folder, step, round, epochs, client, path, up, own)


def _end_unfinished(futures: set[Future[Done]], workers: int) -> None:
    """End the workers if they still run jobs of clients that were deleted, for example by Ctrl-C."""
    if futures:
        processes.end(workers)


def _shared_memory() -> Path | None:
    """The folder for files in memory, if it has enough space; containers often have little."""
    shared = folders.SHARED_MEMORY
    enough = shared.is_dir() and shutil.disk_usage(shared).free >= MIN_SHARED_BYTES
    return shared if enough else None
