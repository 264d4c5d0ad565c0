"""Ray: a cohort spread over the processors, GPUs and machines of a Ray cluster (`pip install edge-fl[scale]`).

Where a client's step runs: `work`, in whatever process Ray chooses: client by client on a CPU, a chunk at a time on a GPU. The images are
put into Ray's store once, personal parts stay here and travel with the work, and Ray does the work of a worker that died again.
Without the address of a cluster in RAY_ADDRESS, one is started on this machine, on loopback.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from edge_fl.errors import ConfigError, RunError
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts, from_arrays, to_arrays, to_device
from edge_fl.methods import build_method
from edge_fl.methods.contract.method import Method
from server.training.client_store import ClientStore
from server.training.engines import processes, schedule
from server.training.engines.personal import PersonalParts
from server.training.engines.sequential import SequentialFleet
from server.training.engines.simulated import SimulatedFleet
from server.training.engines.vector import VectorFleet
from server.training.fleet import ClientId, Downs, Step

AHEAD = 2  # pieces of work under way per worker
TRIES = 3  # how often Ray does the work of a worker that died again
SILENCE_S = 3600.0  # a run ends when nothing has been finished for so long
CHUNK = 64  # clients that go to a GPU together

Arrays = dict[str, dict[str, np.ndarray]]


class RayFleet(SimulatedFleet):
    """The clients of a store on a Ray cluster; `workers` are those to start where there is no cluster yet (0: one per core)."""

    def __init__(
        self, store: ClientStore, method: Method, folder: Path | None = None, *, workers: int = 0
    ) -> None:
        super().__init__(store.settings.clients, PersonalParts(method, folder))
        self._ray, self._store = _connected(workers), store
        gpus = int(self._ray.cluster_resources().get("GPU", 0)) if store.device == "cuda" else 0
        self._workers = gpus or int(self._ray.cluster_resources()["CPU"])
        self._chunk = CHUNK if gpus else 1
        needs = {"num_gpus": 1} if gpus else {"num_cpus": 1}
        self._work = self._ray.remote(max_retries=TRIES, **needs)(work)
        self._placed = self._ray.put(store)

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """Updates as they come, with a bounded number of clients under way."""
        order = schedule.largest_first(downs, self._store.samples)
        running: list[Any] = []
        put = _PutOnce(self._ray)
        while True:
            while len(running) < AHEAD * self._workers and (chunk := list(islice(order, self._chunk))):
                given = [(id, put(downs[id]), to_arrays(self.personal.get(id))) for id in chunk]
                running.append(self._work.remote([self._placed], step, round, given))
            if not running:
                return
            finished, running = self._ray.wait(running, timeout=SILENCE_S)
            if not finished:
                raise RunError(f"round {round}: nothing was finished for {SILENCE_S:.0f} s; the run stops")
            for id, samples, parts, metrics, own in self._result(round, finished[0]):
                if step != "evaluate":
                    self.personal.put(id, from_arrays(own))
                yield Update(id, samples, from_arrays(parts), metrics)

    def _result(
        self, round: int, reference: Any
    ) -> list[tuple[ClientId, int, Arrays, dict[str, float], Arrays]]:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.WorkerCrashedError as error:
            raise RunError(
                f"round {round}: a worker died {TRIES + 1} times ({error}); the run stops"
            ) from error


def work(
    placed: list[Any], step: Step, round: int, given: list[tuple[ClientId, Any, Arrays]]
) -> list[tuple[ClientId, int, Arrays, dict[str, float], Arrays]]:
    """One step of some clients, in a process of Ray's: (client, broadcast, personal parts) -> (client, samples, up, metrics, own)."""
    import ray

    store, method, fleet = _run(placed[0])
    fleet.restore((id, from_arrays(own)) for id, _, own in given)
    downs = {id: to_device(from_arrays(ray.get(down)), store.device) for id, down, _ in given}
    done = []
    for update in fleet.each(step, round, method.at(max(round, 1)), downs):
        id, parts, own = update.client, to_arrays(update.parts), to_arrays(fleet.personal.get(update.client))
        done.append((id, update.samples, parts, update.metrics, own))
        fleet.personal.put(id, {})  # the server has them again
    return done


@lru_cache(maxsize=1)
def _run(placed: Any) -> tuple[ClientStore, Method, SequentialFleet | VectorFleet]:
    """What lasts from one piece of work to the next; a process keeps that of the last run it worked for."""
    import ray
    import torch

    store: ClientStore = ray.get(placed)
    method = build_method(store.settings.spec)
    method.net.to(store.device)
    if store.device == "cuda":
        return store, method, VectorFleet(store, method)
    torch.set_num_threads(1)
    return store, method, SequentialFleet(store, method)


class _PutOnce:
    """Puts a broadcast into Ray's store; one that is the same as the one before is not put again."""

    def __init__(self, ray: Any) -> None:
        self._ray, self._last = ray, Parts()
        self._reference: Any = None

    def __call__(self, down: Parts) -> Any:
        if self._reference is None or not schedule.identical(down, self._last):
            self._last, self._reference = down, self._ray.put(to_arrays(down))
        return self._reference


def _connected(workers: int) -> Any:
    try:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray
    except ImportError as error:
        raise ConfigError("engine 'ray': not installed; pip install 'edge-fl[scale]'") from error
    if not ray.is_initialized():
        local: dict[str, Any] = {"num_cpus": workers or processes.cores(), "_node_ip_address": "127.0.0.1"}
        settings = {} if "RAY_ADDRESS" in os.environ else {**local, "include_dashboard": False}
        ray.init(**settings, log_to_driver=False, configure_logging=False)
    return ray
