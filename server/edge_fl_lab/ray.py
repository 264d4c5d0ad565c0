"""Ray: a cohort distributed over the processors, GPUs and machines of a Ray cluster (`pip install edge-fl[scale]`).

A worker trains client by client on a CPU, a chunk at a time on a GPU (`work`). The images are put into Ray's store once; personal parts
stay here and are sent with the work; Ray repeats the work of a dead worker. Without a cluster's address in RAY_ADDRESS, one is started on
this machine; its processes address each other over loopback.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
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
from edge_fl_server.training.clients import MEASURES, ClientId, Downs, Step
from edge_fl_server.training.engines import folders, processes, simulated
from edge_fl_server.training.engines.simulated import (
    PersonalParts,
    SequentialClients,
    SimulatedClients,
    in_process,
    with_epochs,
)
from edge_fl_server.training.engines.vector import VectorClients
from edge_fl_server.training.studies import ClientStore

QUEUED_PER_WORKER = 2  # chunks
RETRIES = 3  # per chunk, if its worker dies
TIMEOUT_S = 3600.0  # without a finished chunk, after which the run stops
GPU_CHUNK = 64  # clients
LOOPBACK = "127.0.0.2"  # Ray replaces 127.0.0.1 by an address that other machines can reach
USER_HOME = "EDGE_FL_HOME"  # environment variable of a worker: the user's home

Arrays = dict[str, dict[str, np.ndarray]]


def build(store: ClientStore, method: Method) -> "RayClients":
    """Build the clients of the engine "ray", an entry point of `edge_fl.engines`."""
    clients: RayClients = in_process(RayClients, store, method)
    return clients


class RayClients(SimulatedClients):
    """The clients of a store on a Ray cluster; `workers` to start if there is no cluster yet (0: one per core)."""

    engine = "ray"

    def __init__(
        self, store: ClientStore, method: Method, folder: Path | None = None, *, workers: int = 0
    ) -> None:
        super().__init__(store.settings.clients, PersonalParts(method, folder))
        self._ray, self._store = _connect(workers), store
        gpus = int(self._ray.cluster_resources().get("GPU", 0)) if store.device == "cuda" else 0
        self._workers = gpus or int(self._ray.cluster_resources()["CPU"])
        self._chunk = GPU_CHUNK if gpus else 1
        needs = {"num_gpus": 1} if gpus else {"num_cpus": 1}
        self._work = self._ray.remote(max_retries=RETRIES, **needs)(work)
        self._placed = self._ray.put(store)

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        """Yield updates in order of completion. The number of queued clients is bounded."""
        order = simulated.largest_first(downs, self._store.samples)
        running: list[Any] = []
        put = _PutOnce(self._ray)
        while True:
            while len(running) < QUEUED_PER_WORKER * self._workers and (
                chunk := list(islice(order, self._chunk))
            ):
                chunk_inputs = [(id, put(downs[id]), to_arrays(self.personal.get(id))) for id in chunk]
                running.append(self._work.remote([self._placed], step, round, method.epochs, chunk_inputs))
            if not running:
                return
            finished, running = self._ray.wait(running, timeout=TIMEOUT_S)
            if not finished:
                raise RunError(f"round {round}: no client finished within {TIMEOUT_S:.0f} s; the run stops")
            for id, samples, parts, metrics, own in self._result(round, finished[0]):
                if step not in MEASURES:
                    self.personal.put(id, from_arrays(own))
                yield Update(id, samples, from_arrays(parts), metrics)

    def _result(
        self, round: int, reference: Any
    ) -> list[tuple[ClientId, int, Arrays, dict[str, float], Arrays]]:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.WorkerCrashedError as error:
            raise RunError(
                f"round {round}: a worker died {RETRIES + 1} times ({error}); the run stops"
            ) from error


def work(
    placed: list[Any], step: Step, round: int, epochs: int, chunk: list[tuple[ClientId, Any, Arrays]]
) -> list[tuple[ClientId, int, Arrays, dict[str, float], Arrays]]:
    """Run one step of a chunk in a Ray process: (client, broadcast, personal parts) -> (client, samples, up, metrics, own)."""
    import ray

    if home := os.environ.get(USER_HOME):
        os.environ["HOME"] = home
    store, method, clients = _run(placed[0])
    clients.restore((id, from_arrays(own)) for id, _, own in chunk)
    downs = {id: to_device(from_arrays(ray.get(down)), store.device) for id, down, _ in chunk}
    results = []
    for update in clients.each(step, round, with_epochs(method.at(max(round, 1)), epochs), downs):
        id, parts, own = (
            update.client,
            to_arrays(update.parts),
            to_arrays(clients.personal.get(update.client)),
        )
        results.append((id, update.samples, parts, update.metrics, own))
        clients.personal.put(id, {})  # now at the server
    return results


@lru_cache(maxsize=1)
def _run(placed: Any) -> tuple[ClientStore, Method, SequentialClients | VectorClients]:
    """Data and method of a run; a process caches those of its last run."""
    import ray
    import torch

    store: ClientStore = ray.get(placed)
    method = build_method(store.settings.spec)
    method.net.to(store.device)
    if store.device == "cuda":
        return store, method, VectorClients(store, method)
    torch.set_num_threads(1)
    return store, method, SequentialClients(store, method)


class _PutOnce:
    """Put broadcasts into Ray's store; one identical to the previous one is not put again."""

    def __init__(self, ray: Any) -> None:
        self._ray, self._last = ray, Parts()
        self._reference: Any = None

    def __call__(self, down: Parts) -> Any:
        if self._reference is None or not simulated.identical(down, self._last):
            self._last, self._reference = down, self._ray.put(to_arrays(down))
        return self._reference


def _connect(workers: int) -> Any:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("engine 'ray': not installed; pip install 'edge-fl[scale]'") from error
    if not ray.is_initialized():
        settings: dict[str, Any] = {}
        home: AbstractContextManager[None] = nullcontext()
        if "RAY_ADDRESS" not in os.environ:
            folder = folders.create()
            home = _home(folder)
            settings = {"num_cpus": workers or processes.cores(), "_node_ip_address": LOOPBACK}
            settings |= {"include_dashboard": False, "_temp_dir": str(folder)}
        try:
            with home:
                ray.init(**settings, log_to_driver=False, configure_logging=False)
        except Exception as error:  # as Ray raises it
            ray.shutdown()
            raise RunError(f"engine 'ray': no cluster; {error}") from error
    return ray


def _home(folder: Path) -> AbstractContextManager[None]:
    """Give the cluster that is started in this block the home `folder`; workers get the user's one back (`work`).

    Without a bootstrap file there Ray asks the metadata services of three clouds where it runs, whether usage statistics are on or not; and
    its token would be left in the user's home.
    """
    (folder / "ray_bootstrap_config.yaml").write_text("{}")
    return processes.environment({"HOME": os.fspath(folder), USER_HOME: os.environ.get("HOME", "")})
