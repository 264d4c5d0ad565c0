"""A worker process: it maps a run's images and does whole steps of single clients, one at a time, on one thread.

Where a client's step runs: `work`, through `take_step` as in the sequential fleet. Nothing that a worker writes counts before the fleet
has collected it, so a worker may die at any moment and its job be done again.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts, from_arrays, to_arrays
from edge_fl.methods import build_method
from edge_fl.methods.contract.method import Method
from edge_fl.wire import tensors
from server.training.client_store import ClientStore
from server.training.engines.personal import PersonalParts
from server.training.engines.simulated import take_step
from server.training.fleet import ClientId, Step

PERSONAL = "personal"


@dataclass(frozen=True)
class Job:
    """One client's step as it travels to a worker: the run's folder, and the files of its broadcast, its update and its personal parts."""

    folder: Path
    step: Step
    round: int
    client: ClientId
    down: Path
    up: Path
    own: Path


@dataclass(frozen=True)
class Done:
    """What comes back beside the job's files."""

    samples: int
    metrics: dict[str, float]


def work(job: Job) -> Done:
    """One client's step."""
    store, method, personal = _run(job.folder)
    now = method.at(max(job.round, 1))
    update, own = take_step(
        job.step, store[job.client], now, job.round, _down(job.down), personal.get(job.client)
    )
    if job.step != "evaluate" and own:
        job.own.write_bytes(tensors.pack(to_arrays(own)))
    job.up.write_bytes(tensors.pack(to_arrays(update.parts)))
    return Done(update.samples, update.metrics)


def collect(job: Job, done: Done, personal: PersonalParts) -> Update:
    """A finished job's update, and the client's new personal parts put in their place.

    The update's tensors are its mapped file, which has no name any more and is gone when they are.
    """
    if job.own.exists():
        personal.adopt(job.client, job.own)
    with job.up.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    job.up.unlink()
    parts = from_arrays(tensors.unpack(memoryview(mapped)), copy=False)
    return Update(job.client, done.samples, parts, done.metrics)


@lru_cache(maxsize=1)
def _run(folder: Path) -> tuple[ClientStore, Method, PersonalParts]:
    """What lasts from job to job; a process keeps that of the last run it worked for."""
    store = ClientStore.load(folder)
    method = build_method(store.settings.spec)
    return store, method, PersonalParts(method, folder / PERSONAL)


@lru_cache(maxsize=2)
def _down(path: Path) -> Parts:
    return from_arrays(tensors.unpack(path.read_bytes()))
