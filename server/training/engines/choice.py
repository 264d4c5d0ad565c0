"""The engines by name, and the choice between them: a short calibration on the run's own clients says which will be done first.

All engines train the same batches by the same code. `sequential` and `pool` agree to the bit where both use one thread; `vector` adds
numbers in another order and agrees to rounding. So `auto` takes it only when it is clearly faster.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edge_fl.config import CohortConfig, Engine, PrivacyConfig
from edge_fl.errors import ConfigError
from edge_fl.learn.tree import size_bytes, to_device
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.client import Client
from edge_fl.methods.contract.method import Method
from server.training.client_store import ClientStore
from server.training.engines import folders, processes, vector
from server.training.engines.pool import PoolFleet
from server.training.engines.ray import RayFleet
from server.training.engines.sequential import SequentialFleet
from server.training.engines.vector import VectorFleet
from server.training.fleet import ClientId, Fleet

IN_MEMORY_BYTES = 1 << 30  # personal parts of all clients beyond which they are kept in files
SHORT_S = 5.0  # a run as short as this is not worth a calibration
PROBE_S = 1.0  # what trying the vectorised engine may take
PROBE_BATCHES, PROBE_CLIENTS = 2, 16
START_S = 4.0  # until the worker processes have imported torch
CLEARLY = 1.5  # how many times as fast the vectorised engine must be

Build = Callable[[ClientStore, Method], Fleet]


@dataclass(frozen=True)
class Effort:
    """How much a run will ask of its clients: so many rounds with so many of them."""

    rounds: int
    cohort: CohortConfig = CohortConfig()

    def samples(self, store: ClientStore) -> float:
        """Samples of all local updates together, one epoch each."""
        return self.rounds * self.cohort.participation * sum(map(store.samples, store))


def build(
    engine: Engine, store: ClientStore, method: Method, effort: Effort, say: Callable[[str], None]
) -> Fleet:
    """The fleet of an engine; for "auto" of the one that is chosen, and `say` hears which and why. Raises ConfigError."""
    if engine == "auto":
        engine, why = choose(store, method, effort)
        say(f"engine: {engine} ({why})")
    return ENGINES[engine](store, method)


def choose(store: ClientStore, method: Method, effort: Effort) -> tuple[Engine, str]:
    """(engine, why) after a few steps of the run's own clients."""
    if multiprocessing.parent_process() is not None:
        return "sequential", "this process is one of several"
    method = replace(method, privacy=PrivacyConfig())  # a calibration sends nothing
    gpu = store.device != "cpu"
    if gpu and not vector.unable(method):
        return "vector", f"many clients at once on {store.device}"
    samples = effort.samples(store)
    probe = _probe(store, 1)
    here = _seconds(SequentialFleet(probe, method), method, probe) * samples
    if here < SHORT_S or gpu:
        return "sequential", f"about {_about(here)} in all"
    expected = {"sequential": here, "pool": _pooled(store, method, effort, probe)}
    if not vector.unable(method) and (many := _probe(store, _affordable(here / samples, store))):
        fleet = VectorFleet(many, method)
        together = _seconds(fleet, method, many) * samples
        expected |= {} if fleet.fallback else {"vector": together}
    best = min(expected, key=lambda name: expected[name] * (CLEARLY if name == "vector" else 1.0))
    others = ", ".join(f"{name} {_about(seconds)}" for name, seconds in expected.items() if name != best)
    return best, f"about {_about(expected[best])}; {others}"  # type: ignore[return-value]


def _pooled(store: ClientStore, method: Method, effort: Effort, probe: Mapping[ClientId, Client]) -> float:
    """Seconds of the pool: its workers have one thread each, and no round is shorter than its longest client."""
    with processes.threads(1):
        each = _seconds(SequentialFleet(probe, method), method, probe)
    share = effort.samples(store) / processes.cores()
    longest = effort.rounds * max(map(store.samples, store))
    started = 0.0 if processes.running(processes.cores()) else START_S
    return started + each * max(share, longest)


def _probe(store: ClientStore, clients: int) -> dict[ClientId, Client]:
    """Some clients of middling size, with a few batches of their data."""
    order = sorted(store, key=store.samples)
    start = max((len(order) - clients) // 2, 0)
    return {id: _shortened(store[id]) for id in order[start : start + clients]}


def _shortened(client: Client) -> Client:
    first = np.arange(min(len(client.data.train), PROBE_BATCHES * client.batch_size))
    return replace(client, data=replace(client.data, train=client.data.train.take(first)))


def _affordable(seconds_a_sample: float, store: ClientStore) -> int:
    """How many clients can be tried at once; none where single steps take so long that calls do not matter."""
    each = seconds_a_sample * PROBE_BATCHES * store.settings.spec.method.batch_size
    return min(int(PROBE_S / max(each, 1e-9) / 2), PROBE_CLIENTS, len(store))


def _seconds(fleet: Fleet, method: Method, clients: Mapping[ClientId, Client]) -> float:
    """Seconds per sample of a local update; the second of two counts."""
    device = next(iter(clients.values())).device
    shared = to_device(steps.start(method), device)
    downs = {id: steps.broadcast(method, shared, id) for id in clients}
    taken = 0.0
    for _ in range(2):
        began = time.perf_counter()
        for _ in fleet.train(1, method.at(1), downs):
            pass
        taken = time.perf_counter() - began
    return taken / sum(len(client.data.train) for client in clients.values())


def _about(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _sequential(store: ClientStore, method: Method) -> Fleet:
    return _kept(SequentialFleet, dict(store), method)


def _vector(store: ClientStore, method: Method) -> Fleet:
    return _kept(VectorFleet, dict(store), method)


def _pool(store: ClientStore, method: Method) -> Fleet:
    if store.device != "cpu":
        raise ConfigError(f"engine 'pool': computes on the CPU, not on {store.device}; use 'vector'")
    return PoolFleet(store)


def _ray(store: ClientStore, method: Method) -> Fleet:
    return _kept(RayFleet, store, method)


def _kept(kind: Any, clients: Mapping[ClientId, Client], method: Method) -> Fleet:
    """A fleet whose clients' personal parts are in memory, or in files when all of them would be too much for it."""
    each = size_bytes(steps.start_own(method, next(iter(clients))))
    if each * len(clients) <= IN_MEMORY_BYTES:
        return kind(clients, method)
    folder = folders.make()
    fleet = kind(clients, method, folder)
    folders.until_gone(fleet, folder)
    return fleet


ENGINES: dict[str, Build] = {"sequential": _sequential, "pool": _pool, "vector": _vector, "ray": _ray}
