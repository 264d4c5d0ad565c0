"""A worker process of the pool: steps of single clients, one at a time, on one thread.

The pool adopts a worker's output only after the job has finished, so a worker may die at any moment and its job be repeated.
"""

import mmap
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts, from_arrays, to_arrays
from edge_fl.methods import build_method
from edge_fl.methods.contract.method import Method
from edge_fl.wire import tensors
from edge_fl_server.training.client_store import ClientStore
from edge_fl_server.training.clients import MEASURES, ClientId, Step
from edge_fl_server.training.engines.personal import PersonalParts
from edge_fl_server.training.engines.simulated import take_step, with_epochs

PERSONAL = "personal"


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
