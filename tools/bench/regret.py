"""Regret of engine "auto": the time per round of the engine that it chooses, divided by that of the fastest, over a grid of workloads."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from edge_fl.methods import build_method
from edge_fl_server.training.engines import choice
from edge_fl_server.training.engines.processes import threads
from edge_fl_server.training.rounds import Plan
from edge_fl_server.training.studies import ClientStore, Study
from tools.bench import workloads
from tools.bench.figures import Figure
from tools.bench.measure import take_turns
from tools.bench.training import Round

TARGET = 1.15
ROUNDS = 1000  # of a run, so that the start of the pool does not matter
ENGINES = ("sequential", "vector", "pool")
LEAST_TURNS = 3
HOPELESS = 1.5  # times the fastest engine's first round, above which an engine is not measured again
BUSY = "while True: pass"

Grid = Mapping[str, Callable[[], Study]]


def grid() -> Grid:
    """The workloads by name, small enough for rounds below a second."""
    a, heads = partial(workloads.work_a, samples=1000), workloads.heads
    linear = partial(heads, method="fedrep", epochs=0, head_epochs=1)
    return {
        "FedAvg, work A": a,
        "FedRep, 10 head epochs": lambda: a("fedrep", head_epochs=10),
        "FedProto": lambda: a("fedproto"),
        "Ditto": lambda: a("ditto"),
        "100 linear heads": linear,
        "100 small networks": lambda: heads(hidden=100),
        "10 linear heads": lambda: linear(clients=10, samples=730),
        "3 large clients": lambda: a(clients=3),
        "60 tiny clients": lambda: workloads.many(60),
        "ResNet-18, 2 clients": lambda: a(clients=2, samples=30, model="resnet18"),
        "bf16": lambda: a(precision="bf16"),
        "batch norm, 1 client": lambda: a(clients=1, samples=400, model="cnn2-bn"),
    }


def regret(turns: int) -> Figure:
    """The worst regret, with the measurements of every workload as notes."""
    return measured("regret", "chosen engine / fastest, worst of the grid", turns, grid())


def regret_busy(turns: int) -> Figure:
    """The same with one core kept busy by another process."""
    with busy_core():
        return measured("regret busy", "the same next to a busy process", turns, grid())


@contextmanager
def busy_core() -> Iterator[subprocess.Popen[bytes]]:
    """Keep one core busy by a process of its own."""
    with subprocess.Popen([sys.executable, "-c", BUSY]) as process:
        try:
            yield process
        finally:
            process.kill()


def measured(id: str, what: str, turns: int, grid: Grid) -> Figure:
    """The figure of the worst regret."""
    found = {name: regret_of(study(), turns) for name, study in grid.items()}
    worst = max(found, key=lambda name: found[name][0])
    notes = {"worst": worst, **{name: text for name, (_, text) in found.items()}}
    return Figure(id, what, TARGET, at_most=True, value=found[worst][0], notes={**notes})


def regret_of(study: Study, turns: int) -> tuple[float, str]:
    """(regret, the choice in words) of one workload."""
    store = ClientStore.of(study)
    load = os.getloadavg()[0]
    chosen = choice.choose(store, build_method(study.spec), Plan(ROUNDS)).engine
    with threads(1):
        seconds = _seconds(study, chosen, turns)
    value = seconds[chosen] / min(seconds.values())
    sides = ", ".join(f"{name} {each:.3g} s" for name, each in seconds.items())
    return value, f"{chosen}, {value:.2f} ({sides}; load {load:.1f})"


def _seconds(study: Study, chosen: str, turns: int) -> Mapping[str, float]:
    """Median time of a round by engine; hopeless ones, unless chosen, are measured once."""
    rounds = {name: Round(study, name) for name in ENGINES}
    for each in rounds.values():
        each()
    first = {name: times.median for name, times in take_turns(rounds, 1, warm=frozenset(rounds)).items()}
    limit = HOPELESS * min(first.values())
    rest = {name: each for name, each in rounds.items() if first[name] <= limit or name == chosen}
    return first | {
        n: t.median for n, t in take_turns(rest, max(turns, LEAST_TURNS), warm=frozenset(rest)).items()
    }
