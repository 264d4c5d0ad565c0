"""The engines by name, and the choice between them by a short calibration on the run's own clients.

All engines train the same batches with the same code. `sequential` and `pool` agree to the bit if both use one thread; `vector` sums in
another order and agrees up to rounding. `auto` therefore chooses it only if it is clearly faster.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from edge_fl.config import CohortConfig, Engine, PrivacyConfig
from edge_fl.errors import ConfigError
from edge_fl.learn.tree import size_bytes, to_device
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.client import Client
from edge_fl.methods.contract.method import Method
from edge_fl_server.training.client_store import ClientStore
from edge_fl_server.training.engines import folders, processes, vector
from edge_fl_server.training.engines.pool import PoolFleet
from edge_fl_server.training.engines.ray import RayFleet
from edge_fl_server.training.engines.sequential import SequentialFleet
from edge_fl_server.training.engines.vector import VectorFleet
from edge_fl_server.training.fleet import ClientId, Fleet

IN_MEMORY_BYTES = 1 << 30  # larger personal parts of all clients are stored in files
SHORT_S = 5.0  # shorter runs are not calibrated
PROBE_S = 1.0  # limit for the calibration of the vectorised engine
PROBE_BATCHES, PROBE_CLIENTS = 2, 16
START_S = 4.0  # start of the worker processes: import of torch
MIN_SPEEDUP = 1.5  # of the vectorised engine

Build = Callable[[ClientStore, Method], Fleet]


@dataclass(frozen=True)
class Effort:
    """Size of a run: rounds and cohorts."""

    rounds: int
    cohort: CohortConfig = CohortConfig()

    def samples(self, store: ClientStore) -> float:
        """Number of samples trained on in all local updates, at one epoch each."""
        return self.rounds * self.cohort.participation * sum(map(store.samples, store))


def build(
    engine: Engine, store: ClientStore, method: Method, effort: Effort, report: Callable[[str], None]
) -> Fleet:
    """Build the fleet of an engine; "auto" chooses one and passes the reason to `report`. Raises ConfigError."""
    if engine == "auto":
        engine, reason = choose(store, method, effort)
        report(f"engine: {engine} ({reason})")
    return ENGINES[engine](store, method)


def choose(store: ClientStore, method: Method, effort: Effort) -> tuple[Engine, str]:
    """Choose an engine after a few steps of the run's own clients -> (engine, reason)."""
    if multiprocessing.parent_process() is not None:
        return "sequential", "this process is one of several"
    method = replace(method, privacy=PrivacyConfig())  # a calibration sends nothing
    gpu, vectorises = store.device != "cpu", not vector.obstacle(method)
    if gpu and vectorises:
        return "vector", f"many clients at once on {store.device}"
    samples = effort.samples(store)
    probe = _probe(store, 1)
    sequential_s = _seconds_per_sample(SequentialFleet(probe, method), method, probe) * samples
    if sequential_s < SHORT_S or gpu:
        return "sequential", f"about {_about(sequential_s)} in all"
    expected = {"sequential": sequential_s, "pool": _pool_seconds(store, method, effort, probe)}
    if vectorises and (many := _probe(store, _affordable(sequential_s / samples, store))):
        fleet = VectorFleet(many, method)
        vector_s = _seconds_per_sample(fleet, method, many) * samples
        expected |= {} if fleet.fallback else {"vector": vector_s}
    best = min(expected, key=lambda name: expected[name] * (MIN_SPEEDUP if name == "vector" else 1.0))
    others = ", ".join(f"{name} {_about(seconds)}" for name, seconds in expected.items() if name != best)
    return best, f"about {_about(expected[best])}; {others}"  # type: ignore[return-value]


def _pool_seconds(
    store: ClientStore, method: Method, effort: Effort, probe: Mapping[ClientId, Client]
) -> float:
    """Expected duration with the pool: its workers have one thread each, and no round is shorter than its longest client."""
    with processes.threads(1):
        per_sample = _seconds_per_sample(SequentialFleet(probe, method), method, probe)
    share = effort.samples(store) / processes.cores()
    longest = effort.rounds * max(map(store.samples, store))
    start_s = 0.0 if processes.running(processes.cores()) else START_S
    return start_s + per_sample * max(share, longest)


def _probe(store: ClientStore, clients: int) -> dict[ClientId, Client]:
    """Clients of medium size, with a few batches of their data."""
    order = sorted(store, key=store.samples)
    start = max((len(order) - clients) // 2, 0)
    return {id: _shortened(store[id]) for id in order[start : start + clients]}


def _shortened(client: Client) -> Client:
    first = np.arange(min(len(client.data.train), PROBE_BATCHES * client.batch_size))
    return replace(client, data=replace(client.data, train=client.data.train.take(first)))


def _affordable(seconds_per_sample: float, store: ClientStore) -> int:
    """Number of clients to calibrate the vectorised engine with; 0 if single steps are so slow that overhead does not matter."""
    per_client = seconds_per_sample * PROBE_BATCHES * store.settings.spec.method.batch_size
    return min(int(PROBE_S / max(per_client, 1e-9) / 2), PROBE_CLIENTS, len(store))


def _seconds_per_sample(fleet: Fleet, method: Method, clients: Mapping[ClientId, Client]) -> float:
    """Duration of a local update per sample; the second of two is measured."""
    device = next(iter(clients.values())).device
    shared = to_device(steps.start(method), device)
    downs = {id: steps.broadcast(method, shared, id) for id in clients}
    seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        for _ in fleet.train(1, method.at(1), downs):
            pass
        seconds = time.perf_counter() - start
    return seconds / sum(len(client.data.train) for client in clients.values())


def _about(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _pool(store: ClientStore, method: Method) -> Fleet:
    if store.device != "cpu":
        raise ConfigError(f"engine 'pool': computes on the CPU, not on {store.device}; use 'vector'")
    return PoolFleet(store)


def _in_process(kind: Any, store: ClientStore, method: Method) -> Fleet:
    """A fleet with its clients' personal parts in memory, or in files if they are too large."""
    clients = store if kind is RayFleet else dict(store)
    size = size_bytes(steps.start_own(method, next(iter(clients))))
    if size * len(clients) <= IN_MEMORY_BYTES:
        return kind(clients, method)
    folder = folders.create()
    fleet = kind(clients, method, folder)
    folders.remove_with(fleet, folder)
    return fleet


ENGINES: dict[str, Build] = {
    "sequential": partial(_in_process, SequentialFleet),
    "pool": _pool,
    "vector": partial(_in_process, VectorFleet),
    "ray": partial(_in_process, RayFleet),
}
