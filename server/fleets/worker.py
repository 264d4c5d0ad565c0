"""A worker process: it holds one method and the clients' images, and runs whole steps of single clients, one at a time, on one thread."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from edge_fl.config import TaskSpec
from edge_fl.data.partition import Split
from edge_fl.data.samples import ClientData, Samples
from edge_fl.learn.mean import Update
from edge_fl.learn.tree import Parts, from_arrays, to_arrays
from edge_fl.methods import build_method
from edge_fl.methods.client import Client
from edge_fl.wire import tensors
from server.fleets.personal import Personal

Step = Literal["train", "personalise", "evaluate"]
X, Y, SPLIT, PERSONAL = "x.npy", "y.npy", "split.npz", "personal"


@dataclass(frozen=True)
class Job:
    """One client's step, as it travels to a worker; `down` is the file of its broadcast."""

    step: Step
    round: int
    client: str
    down: Path


@dataclass(frozen=True)
class Done:
    """What comes back: the update, its parts as safetensors."""

    client: str
    samples: int
    parts: bytes
    metrics: dict[str, float]

    def update(self) -> Update:
        """The update with its parts as tensors."""
        return Update(self.client, self.samples, from_arrays(tensors.unpack(self.parts)), self.metrics)


class Worker:
    """Everything that lasts from job to job. Images stay in the file that all workers map."""

    def __init__(self, spec: TaskSpec, folder: Path) -> None:
        torch.set_num_threads(1)
        self._spec, self._method = spec, build_method(spec)
        self._x, self._y = np.load(folder / X, mmap_mode="r"), np.load(folder / Y)
        self._split = Split.load(folder / SPLIT)
        self._personal = Personal(self._method, folder / PERSONAL)

    def run(self, job: Job) -> Done:
        """One step of one client; its personal parts are read before and written after."""
        client, down, own = self._client(job.client), _down(job.down), self._personal.get(job.client)
        method = self._method.at(max(job.round, 1))
        if job.step == "evaluate":
            update = Update(job.client, len(client.data.train), {}, client.evaluate(method, down, own))
        else:
            step = client.train if job.step == "train" else client.personalise
            update, own = step(method, job.round, down, own)
            self._personal.put(job.client, own)
        return Done(update.client, update.samples, tensors.pack(to_arrays(update.parts)), update.metrics)

    def _client(self, id: str) -> Client:
        row = self._split.clients.index(id)
        rows = (self._split.train[row], self._split.validation[row], self._split.test[row])
        data = ClientData(*(Samples(np.asarray(self._x[indices]), self._y[indices]) for indices in rows))
        spec = self._spec
        return Client(id, data, len(spec.classes), spec.method.batch_size, spec.seed)


@lru_cache(maxsize=2)
def _down(path: Path) -> Parts:
    return from_arrays(tensors.unpack(path.read_bytes()))


_workers: list[Worker] = []


def start(spec: TaskSpec, folder: Path) -> None:
    """Called once in each new process."""
    _workers.append(Worker(spec, folder))


def work(job: Job) -> Done:
    """Called for each job, in the process that `start` prepared."""
    return _workers[0].run(job)
