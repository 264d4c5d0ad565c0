"""The engines by name, and the choice between them by a short measurement on the run's own clients.

All engines train the same batches with the same code. `sequential` and `pool` agree to the bit if both use one thread; `vector` sums in
another order and agrees up to rounding. Each is measured with one thread per process, because threads that share a step wait for each other
as soon as another program uses a core. The chosen one computes with one thread, too.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping

import torch
from msgspec.structs import replace

from edge_fl import plugins
from edge_fl.errors import ConfigError, nearest
from edge_fl.learn.aggregation.mean import Update
from edge_fl.methods import build_method
from edge_fl.methods.contract.method import Method
from edge_fl_server.training.client_store import ClientStore
from edge_fl_server.training.clients import Clients, Downs, Step, WrappedClients
from edge_fl_server.training.engine_timing import EngineTiming
from edge_fl_server.training.engines import measure, processes, vector
from edge_fl_server.training.engines.measure import RoundTime
from edge_fl_server.training.engines.pool import PoolClients
from edge_fl_server.training.engines.sequential import SequentialClients
from edge_fl_server.training.engines.simulated import in_process
from edge_fl_server.training.engines.vector import VectorClients
from edge_fl_server.training.rounds import Plan

SHORT_S = 2.0  # shorter runs are not calibrated
SAMPLE_S, SAMPLE_SHARE = 0.2, 0.02  # duration of a round of the sample, and at most which share of the run
SLOW_STEP_S = 0.004  # steps of a client above which the overhead that `vector` saves does not matter
CLEAR_LEAD = 1.3  # of the fastest engine after one round of each, at which no further rounds are measured
MIN_SPEEDUP = 1.1  # of `vector`, which rounds differently, and of a pool that is not running

Build = Callable[[ClientStore, Method], Clients]
ENTRY_POINTS = "edge_fl.engines"
"""The entry-point group of further engines: name -> `Build`."""


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
) -> Clients:
    """Build the clients of an engine. "auto" chooses one, if none is `chosen` yet, and `report`s the reason. Raises ConfigError."""
    if engine == "auto" and chosen is None:
        chosen = choose(store, method, plan)
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


def choose(store: ClientStore, method: Method, plan: Plan) -> EngineTiming:
    """Choose an engine: on a CPU by a measurement, on another device `vector` if the method allows it."""
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
        return _measure(store, plan, EngineTiming("sequential", processes.cores(), 1, load))


def _measure(store: ClientStore, plan: Plan, blank: EngineTiming) -> EngineTiming:
    """Measure the engines that can be the fastest, and complete the record."""
    one = measure.sample(store, measure.LEAST_BATCHES)
    method = build_method(one.settings.spec)
    alone = measure.round_times({"": SequentialClients(dict(one), method)}, method, {"": 1}, repeats=1)[""]
    batch_s = alone.train / sum(measure.batches(one).values())
    step_s = batch_s / _epochs(method)
    in_all_s = plan.rounds * measure.expected(alone, one, store, plan)
    if in_all_s < SHORT_S:
        return replace(blank, reason=f"about {in_all_s:.1g} s in all, too short to compare engines")
    part = measure.sample(store, min(SAMPLE_S, SAMPLE_SHARE * in_all_s) / batch_s, blank.cores)
    engines: dict[str, Clients] = {"sequential": SequentialClients(dict(part), method)}
    left_out = {}
    if obstacle := vector.obstacle(method):
        left_out["vector"] = obstacle
    elif step_s > SLOW_STEP_S:
        left_out["vector"] = f"a step takes {1000 * step_s:.0f} ms, most of it arithmetic"
    else:
        engines["vector"] = VectorClients(dict(part), method)

    workers = {"sequential": 1, "vector": 1, "pool": blank.cores}

    def in_run(times: Mapping[str, RoundTime]) -> dict[str, float]:
        return {
            name: measure.expected(each, part, store, plan, workers[name], workers[name])
            for name, each in times.items()
        }

    times = measure.round_times(engines, method, workers, repeats=1)
    for name, clients in [*engines.items()]:
        if isinstance(clients, VectorClients) and clients.fallback:
            left_out[name] = clients.fallback
            del engines[name], times[name]
    seconds = in_run(times)
    at_best = measure.expected(times["sequential"], part, store, plan, blank.cores)
    was_running = processes.running(blank.cores)
    start_s = processes.start_seconds(blank.cores)
    if MIN_SPEEDUP * (start_s + plan.rounds * at_best) < plan.rounds * min(seconds.values()):
        engines["pool"] = PoolClients(part)
        seconds |= in_run(measure.round_times({"pool": engines["pool"]}, method, workers, repeats=1))
    else:
        best = min(seconds, key=seconds.__getitem__)
        left_out["pool"] = f"with {blank.cores} processes at best as fast as {best}, including their start"
    fastest = sorted(seconds.values())
    if len(fastest) > 1 and fastest[1] < CLEAR_LEAD * fastest[0]:
        seconds = in_run(measure.round_times(engines, method, workers))
    # only measured engines are in `seconds`: a pool's lower bound is no measurement
    engine = min(seconds, key=lambda name: seconds[name] * (MIN_SPEEDUP if name == "vector" else 1.0))
    if engine != "pool" and not was_running:
        processes.end(blank.cores)
    return replace(blank, engine=engine, seconds=seconds, left_out=left_out)


def _epochs(method: Method) -> int:
    """Passes of a local update over a client's data, some of them over features alone."""
    return max(method.epochs, 1) + int(getattr(method, "head_epochs", 0))


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
