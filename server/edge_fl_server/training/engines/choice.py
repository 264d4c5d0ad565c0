"""The engines by name, and the choice between them by a short measurement on the run's own clients.

All engines train the same batches with the same code. `sequential` and `pool` agree to the bit if both use one thread; `vector` sums in
another order and agrees up to rounding. Each is measured with one thread per process, because threads that share a step wait for each
other as soon as another program uses a core. The chosen one computes with one thread, too.

A sample of the run's clients is measured, and extrapolated to its rounds by the number of batches, and of epochs where a step takes long.
The sample is a store of its own, so that the run's personal parts and privacy budgets are untouched. A small federation is its own sample.
"""

import dataclasses
import heapq
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from edge_fl import plugins
from edge_fl.config import PrivacyConfig
from edge_fl.console import units
from edge_fl.console.progress import Count, Watch, unwatched
from edge_fl.data.partition import Split
from edge_fl.errors import ConfigError, nearest
from edge_fl.learn.aggregation.mean import Update
from edge_fl.learn.tree import Parts
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.methods.contract.method import Method
from edge_fl_server.training.clients import ClientId, Clients, Downs, Step, WrappedClients
from edge_fl_server.training.engines import processes, vector
from edge_fl_server.training.engines.pool import PoolClients
from edge_fl_server.training.engines.simulated import SequentialClients, in_process
from edge_fl_server.training.engines.vector import VectorClients
from edge_fl_server.training.records import EngineTiming
from edge_fl_server.training.rounds import Plan
from edge_fl_server.training.studies import ClientStore

REPEATS, BUDGET_S = 3, 0.8  # of a comparison, after a warm-up round of each engine
LEAST_BATCHES = 2  # of a client
SHORT_S = 2.0  # shorter runs are not calibrated
SAMPLE_S, SAMPLE_SHARE = 0.2, 0.02  # duration of a round of the sample, and at most which share of the run
MOST_SHARE, LEAST_LIMIT_S = 0.05, 2.0  # of the run that measurements may take, and what they always may
WARM_S = 1.0  # a first round that takes longer is not repeated: the start is a small part of it
TOLD_S = 5.0  # longer measurements are announced
SLOW_STEP_S = 0.004  # steps of a client above which the overhead that `vector` saves does not matter
CLEAR_LEAD = 1.3  # of the fastest engine after one round of each, at which no further rounds are measured
MIN_SPEEDUP = 1.1  # of `vector`, which rounds differently, and of a pool that is not running
Clock = Callable[[], float]
Build = Callable[[ClientStore, Method], Clients]
ENTRY_POINTS = "edge_fl.engines"
"""The entry-point group of further engines: name -> `Build`."""


class RoundTime(NamedTuple):
    """Seconds of training and of one evaluation of all clients of a sample."""

    train: float
    evaluate: float


def cohort_sizes(plan: Plan, store: ClientStore) -> list[int]:
    """Batches of the clients of an average cohort: evenly spaced in the order of their sizes."""
    everyone = sorted(batches(store).values())
    count = max(int(plan.cohort.mean_participation * len(everyone)), 1)
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


def sample(store: ClientStore, at_most: float, least: int = 1, *, once: bool = False) -> ClientStore:
    """Clients of about mean size with `at_most` batches in all, at least `least` clients with LEAST_BATCHES each.

    The whole store if it fits. Clients that are too large are shortened, with their validation and test sets. `once`: they train one epoch.
    """
    sizes = batches(store)
    order = sorted(store, key=lambda id: (sizes[id], id))
    total = sum(sizes.values())
    if total <= at_most:
        return _part(store, order, 1.0, once)
    mean = total / len(order)
    count = min(max(int(at_most / mean / least), 1) * least, len(order))
    sums = np.convolve([sizes[id] for id in order], np.ones(count), "valid")
    start = int(np.abs(sums - mean * count).argmin())
    chosen = order[start : start + count]
    return _part(store, chosen, min(at_most / sums[start], 1.0), once)


def _part(store: ClientStore, clients: Sequence[ClientId], share: float, once: bool) -> ClientStore:
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
    config = settings.spec.method
    config = replace(config, epochs=min(config.epochs, 1)) if once else config
    spec = replace(settings.spec, method=config, privacy=PrivacyConfig(), evaluate_every=0)
    small = replace(settings, spec=spec, clients=ids)
    return dataclasses.replace(
        store,
        settings=small,
        x=np.asarray(store.x[taken]),
        y=store.y[taken],
        split=Split(len(taken), ids, *sets),
    )


def round_times(
    engines: Mapping[str, Clients],
    method: Method,
    workers: Mapping[str, int],
    *,
    repeats: int = REPEATS,
    watch: Watch = unwatched,
    clock: Clock = time.perf_counter,
) -> dict[str, RoundTime]:
    """Median times of a round by each engine's clients, trained by so many `workers`; they alternate, after a warm-up round of each.

    If all take more than WARM_S, they are not repeated.
    """
    shared = steps.start(method)

    def timed(name: str) -> RoundTime:
        return _round(engines[name], method, shared, workers[name], f"timing engine {name}", watch, clock)

    first = {name: timed(name) for name in engines}
    if min(map(sum, first.values())) > WARM_S:
        return first
    found: dict[str, list[RoundTime]] = {name: [] for name in engines}
    began = time.perf_counter()
    for _ in range(repeats):
        for name in engines:
            found[name].append(timed(name))
        if time.perf_counter() - began > BUDGET_S * len(engines):
            break
    return {
        name: RoundTime(*map(statistics.median, zip(*times, strict=True))) for name, times in found.items()
    }


def _round(
    clients: Clients, method: Method, shared: Parts, workers: int, stage: str, watch: Watch, clock: Clock
) -> RoundTime:
    now, of = method.at(1), len(clients.ids())
    downs: Downs = {id: steps.broadcast(now, shared, id) for id in clients.ids()}
    watch(Count(stage, 0, of))
    start = clock()
    arrivals = []
    for done, _ in enumerate(clients.each("train", 1, now, downs), 1):
        arrivals.append(clock() - start)
        watch(Count(stage, done - (done == of), of))  # its evaluation is left
    middle = clock()
    if method.predicts_early or method.has_global:
        for _ in clients.each("evaluate", 1, now, downs):
            pass
    end = clock()
    watch(Count(stage, of, of))
    return RoundTime(balanced(arrivals, workers), end - middle)


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


class ChosenClients(WrappedClients):
    """The clients of a chosen engine, which computes with the number of threads that was measured."""

    def __init__(self, clients: Clients, timing: EngineTiming) -> None:
        super().__init__(clients)
        self._timing = timing

    @property
    def engine_timing(self) -> EngineTiming:
        return self._timing

    def each(self, step: Step, round: int, method: Method, downs: Downs) -> Iterator[Update]:
        with processes.threads(self._timing.threads):
            yield from self._clients.each(step, round, method, downs)


def build(
    engine: str,
    store: ClientStore,
    method: Method,
    plan: Plan,
    report: Callable[[str], None],
    chosen: EngineTiming | None = None,
    watch: Watch = unwatched,
) -> Clients:
    """Build the clients of an engine. "auto" chooses one, if none is `chosen` yet, and `report`s the reason. Raises ConfigError."""
    if engine == "auto" and chosen is None:
        chosen = choose(store, method, plan, report, watch)
        report(f"engine: {chosen}")
    if chosen is None:
        return find(engine)(store, method)
    return ChosenClients(find(chosen.engine)(store, method), chosen)


def require(engine: str) -> None:
    """Raise ConfigError for an engine that does not exist."""
    if engine != "auto":
        find(engine)


def find(engine: str) -> Build:
    """The function that builds an engine's clients. Raises ConfigError for an unknown one."""
    if engine in ENGINES:
        return ENGINES[engine]
    if found := plugins.registered(ENTRY_POINTS, engine, "engine", ConfigError):
        return found
    known = ["auto", *ENGINES, *plugins.names(ENTRY_POINTS)]
    raise ConfigError(
        f"engine {engine!r}: unknown{nearest(engine, known)}; expected one of {', '.join(known)}"
    )


def choose(
    store: ClientStore,
    method: Method,
    plan: Plan,
    report: Callable[[str], None] = lambda line: None,
    watch: Watch = unwatched,
) -> EngineTiming:
    """Choose an engine: on a CPU by a measurement, on another device `vector` if the method allows it.

    `report` receives a line if the measurement takes long, `watch` its progress.
    """
    load = os.getloadavg()[0]
    engine, reason, threads = "", "", torch.get_num_threads()
    if multiprocessing.parent_process() is not None:
        engine, reason = "sequential", "this process is one of several"
    elif store.device != "cpu":
        obstacle = vector.obstacle(method)
        engine = "sequential" if obstacle else "vector"
        reason = obstacle or f"many clients at once on {store.device}"
    if engine:
        return EngineTiming(engine, processes.cores(), threads, load, reason)
    with processes.threads(1):
        return _measure(store, plan, EngineTiming("sequential", processes.cores(), 1, load), report, watch)


class Pace(NamedTuple):
    """Seconds of all rounds of a run, of a batch in all its epochs, and of a step, if its clients train one after another."""

    in_all_s: float
    batch_s: float
    step_s: float


def pace(store: ClientStore, plan: Plan, watch: Watch = unwatched, clock: Clock = time.perf_counter) -> Pace:
    """Measure one client with a few batches, in one epoch."""
    one = sample(store, LEAST_BATCHES, once=True)
    times = _alone(one, watch, clock)
    step_s = times.train / sum(batches(one).values()) / _passes(one)
    times = times._replace(train=times.train * _passes(store) / _passes(one))
    batch_s = times.train / sum(batches(one).values())
    return Pace(plan.rounds * expected(times, one, store, plan), batch_s, step_s)


def run_seconds(store: ClientStore, plan: Plan, clock: Clock = time.perf_counter) -> float:
    """Expected duration of all rounds of a run whose clients train one after another. A model of short steps is measured a second time."""
    found = pace(store, plan, clock=clock)
    if found.step_s > SLOW_STEP_S:
        return found.in_all_s
    part = sample(store, SAMPLE_S / found.batch_s)
    return plan.rounds * expected(_alone(part, unwatched, clock), part, store, plan)


def _alone(part: ClientStore, watch: Watch, clock: Clock) -> RoundTime:
    method = build_method(part.settings.spec)
    engines = {"sequential": SequentialClients(dict(part), method)}
    return round_times(engines, method, {"sequential": 1}, repeats=1, watch=watch, clock=clock)["sequential"]


def _passes(store: ClientStore) -> int:
    """How often a client trains with each of its samples, some of them over features alone."""
    method = build_method(store.settings.spec)
    return max(method.epochs, 1) + int(getattr(method, "head_epochs", 0))


def _measure(
    store: ClientStore, plan: Plan, blank: EngineTiming, report: Callable[[str], None], watch: Watch
) -> EngineTiming:
    """Measure the engines that can be the fastest, and complete the record."""
    began = time.perf_counter()
    in_all_s, batch_s, step_s = pace(store, plan, watch)
    if in_all_s < SHORT_S:
        return replace(blank, reason=f"about {in_all_s:.1g} s in all, too short to compare engines")
    slow = step_s > SLOW_STEP_S
    at_most = min(SAMPLE_S, SAMPLE_SHARE * in_all_s) / batch_s
    part = sample(store, at_most, blank.cores, once=slow)
    method = build_method(part.settings.spec)
    engines: dict[str, Clients] = {"sequential": SequentialClients(dict(part), method)}
    left_out = {}
    if obstacle := vector.obstacle(method):
        left_out["vector"] = obstacle
    elif slow:
        left_out["vector"] = f"a step takes {1000 * step_s:.0f} ms, most of it arithmetic"
    else:
        engines["vector"] = VectorClients(dict(part), method)

    workers = {"sequential": 1, "vector": 1, "pool": blank.cores}
    passes = _passes(store) / _passes(part)

    def in_run(names: Mapping[str, Clients], repeats: int = 1) -> dict[str, float]:
        """Expected seconds of a round of the run with each engine."""
        times = round_times(names, method, workers, repeats=repeats, watch=watch)
        return {
            name: expected(
                each._replace(train=each.train * passes), part, store, plan, workers[name], workers[name]
            )
            for name, each in times.items()
        }

    start_s = processes.start_seconds(blank.cores)
    at_best = in_all_s / plan.rounds * _lower_bound(store, plan, blank.cores)
    takes_s = 2 * batch_s / passes * sum(batches(part).values())  # by `sequential` and, at worst, `pool`
    if takes_s > max(MOST_SHARE * in_all_s, LEAST_LIMIT_S):
        pays = slow and CLEAR_LEAD * (start_s + plan.rounds * at_best) < in_all_s
        return replace(
            blank,
            engine="pool" if pays else "sequential",
            reason=f"to measure others would take more than {MOST_SHARE:.0%} of the run",
        )
    if takes_s > TOLD_S:
        report(f"timing the engines on {len(part)} clients: about {units.seconds(takes_s, 0)}")
    seconds = in_run(engines)
    for name, clients in [*engines.items()]:
        if isinstance(clients, VectorClients) and clients.fallback:
            left_out[name] = clients.fallback
            del engines[name], seconds[name]
    was_running = processes.running(blank.cores)
    at_best = seconds["sequential"] * _lower_bound(store, plan, blank.cores)
    if MIN_SPEEDUP * (start_s + plan.rounds * at_best) < plan.rounds * min(seconds.values()):
        processes.pool(blank.cores)  # its start is no part of a round
        engines["pool"] = PoolClients(part)
        seconds |= in_run({"pool": engines["pool"]})
    else:
        best = min(seconds, key=seconds.__getitem__)
        left_out["pool"] = f"with {blank.cores} processes at best as fast as {best}, including their start"
    close = {
        name: engines[name] for name, each in seconds.items() if each < CLEAR_LEAD * min(seconds.values())
    }
    if len(close) > 1 and time.perf_counter() - began < max(MOST_SHARE * in_all_s, LEAST_LIMIT_S):
        seconds |= in_run(close, REPEATS)
    # only measured engines are in `seconds`: a pool's lower bound is no measurement
    engine = min(seconds, key=lambda name: seconds[name] * (MIN_SPEEDUP if name == "vector" else 1.0))
    if engine != "pool" and not was_running:
        processes.end(blank.cores)
    return replace(blank, engine=engine, seconds=seconds, left_out=left_out)


def _lower_bound(store: ClientStore, plan: Plan, workers: int) -> float:
    """Share of a round's duration that is left with so many workers at best: no round is shorter than its largest client."""
    sizes = cohort_sizes(plan, store)
    return longest(sizes, workers) / sum(sizes)


def _pool(store: ClientStore, method: Method) -> Clients:
    if store.device != "cpu":
        raise ConfigError(f"engine 'pool': computes on the CPU, not on {store.device}; use 'vector'")
    processes.return_memory()  # that of the measurement
    return PoolClients(store)


ENGINES: dict[str, Build] = {
    "sequential": lambda store, method: in_process(SequentialClients, dict(store), method),
    "pool": _pool,
    "vector": lambda store, method: in_process(VectorClients, dict(store), method),
}
