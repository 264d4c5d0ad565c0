"""Measure engines on a sample of a run's clients, and extrapolate to its rounds by the number of batches.

The sample is a store of its own, so that the run's personal parts and privacy budgets are untouched. A small federation is its own sample.
"""

import heapq
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import msgspec
import numpy as np

from edge_fl.config import PrivacyConfig
from edge_fl.data.partition import Split
from edge_fl.learn.tree import Parts
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl_server.training.client_store import ClientStore
from edge_fl_server.training.clients import ClientId, Clients, Downs
from edge_fl_server.training.rounds import Plan

REPEATS, BUDGET_S = 3, 0.8  # of a comparison, after a warm-up round of each engine
LEAST_BATCHES = 2  # of a client


class RoundTime(NamedTuple):
    """Seconds of training and of one evaluation of all clients of a sample."""

    train: float
    evaluate: float


def cohort_sizes(plan: Plan, store: ClientStore) -> list[int]:
    """Batches of the clients of an average cohort: evenly spaced in the order of their sizes."""
    everyone = sorted(batches(store).values())
    count = max(int(plan.cohort.participation * len(everyone)), 1)
    return [everyone[int((place + 0.5) * len(everyone) / count)] for place in range(count)]


def batches(store: ClientStore) -> dict[ClientId, int]:
    """Training batches per client."""
    return {id: -(-store.samples(id) // store.settings.spec.method.batch_size) for id in store}


def longest(sizes: Sequence[int], workers: int) -> int:
    """Batches of the busiest of `workers` that take the largest client first: no round is shorter than its largest client."""
    loads = [0] * workers
    for size in sorted(sizes, reverse=True):
        heapq.heapreplace(loads, loads[0] + size)
    return max(loads)


def sample(store: ClientStore, at_most: float, least: int = 1) -> ClientStore:
    """Clients of about mean size with `at_most` batches in all, at least `least` clients with LEAST_BATCHES each.

    The whole store if it fits. Clients that are too large are shortened, with their validation and test sets.
    """
    sizes = batches(store)
    order = sorted(store, key=lambda id: (sizes[id], id))
    total = sum(sizes.values())
    if total <= at_most:
        return _part(store, order, 1.0)
    mean = total / len(order)
    count = min(max(int(at_most / mean / least), 1) * least, len(order))
    sums = np.convolve([sizes[id] for id in order], np.ones(count), "valid")
    start = int(np.abs(sums - mean * count).argmin())
    chosen = order[start : start + count]
    return _part(store, chosen, min(at_most / sums[start], 1.0))


def _part(store: ClientStore, clients: Sequence[ClientId], share: float) -> ClientStore:
    """A share of the data of some clients, without privacy, because a measurement sends nothing, and without evaluation of updates."""
    split, settings = store.split, store.settings
    shortest = LEAST_BATCHES * settings.spec.method.batch_size
    places = {id: place for place, id in enumerate(split.clients)}
    ids = tuple(sorted(clients))
    kept: list[list[np.ndarray]] = []
    for part, least in ((split.train, shortest), (split.validation, 0), (split.test, 0)):
        rows = [part[places[id]] for id in ids]
        kept.append([row[: max(ceil(len(row) * share), least)] for row in rows])
    flat = [row for part in kept for row in part]
    taken = np.concatenate(flat)
    ends = np.cumsum([len(row) for row in flat])[:-1]
    renumbered = np.split(np.arange(len(taken)), ends)
    sets = (tuple(renumbered[n * len(ids) : (n + 1) * len(ids)]) for n in range(3))
    spec = msgspec.structs.replace(settings.spec, privacy=PrivacyConfig(), evaluate_every=0)
    small = msgspec.structs.replace(settings, spec=spec, clients=ids)
    return replace(
        store,
        settings=small,
        x=np.asarray(store.x[taken]),
        y=store.y[taken],
        split=Split(len(taken), ids, *sets),
    )


def round_times(
    engines: Mapping[str, Clients], method: Method, workers: Mapping[str, int], *, repeats: int = REPEATS
) -> dict[str, RoundTime]:
    """Median times of a round by each engine's clients, trained by so many `workers`; they alternate, after a warm-up round of each."""
    shared = steps.start(method)
    found: dict[str, list[RoundTime]] = {name: [] for name in engines}
    for name, clients in engines.items():
        _round(clients, method, shared, workers[name])
    began = time.perf_counter()
    for _ in range(repeats):
        for name, clients in engines.items():
            found[name].append(_round(clients, method, shared, workers[name]))
        if time.perf_counter() - began > BUDGET_S * len(engines):
            break
    return {
        name: RoundTime(*map(statistics.median, zip(*times, strict=True))) for name, times in found.items()
    }


def _round(clients: Clients, method: Method, shared: Parts, workers: int) -> RoundTime:
    now = method.at(1)
    downs: Downs = {id: steps.broadcast(now, shared, id) for id in clients.ids()}
    start = time.perf_counter()
    arrivals = [time.perf_counter() - start for _ in clients.train(1, now, downs)]
    middle = time.perf_counter()
    if method.predicts_early or method.has_global:
        for _ in clients.evaluate(1, now, downs):
            pass
    return RoundTime(balanced(arrivals, workers), time.perf_counter() - middle)


def balanced(arrivals: Sequence[float], workers: int) -> float:
    """Duration of a round whose updates arrived so many seconds after its start.

    If each worker trained one client, at the pace of all together: in a whole round a worker on a core that another program uses gets fewer
    clients, so that it must not decide alone.
    """
    if len(arrivals) != workers:
        return arrivals[-1]
    return workers / sum(1.0 / seconds for seconds in arrivals)


def expected(
    measured: RoundTime,
    part: ClientStore,
    store: ClientStore,
    plan: Plan,
    workers: int = 1,
    measured_workers: int = 1,
) -> float:
    """Expected duration of a round of the run with `workers` at a time, from that of a sample of its clients with `measured_workers`.

    Every `evaluate_every` rounds the cohort evaluates its updates, and then all clients the shared model.
    """
    of_part = longest([*batches(part).values()], measured_workers)
    cohort = longest(cohort_sizes(plan, store), workers) / of_part
    everyone = longest([*batches(store).values()], workers) / of_part
    every = store.settings.spec.evaluate_every
    evaluation = measured.evaluate * (cohort + everyone) / every if every else 0.0
    return measured.train * cohort + evaluation
