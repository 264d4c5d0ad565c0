"""A1 to A4: whole rounds of local training by each engine, beside the plain loop on the same batches."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from edge_fl.learn.tree import Parts, to_device
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from server.training import rounds
from server.training.client_store import ClientStore
from server.training.engines.choice import ENGINES
from server.training.engines.processes import threads
from server.training.fleet import Fleet
from server.training.rounds import Broadcasts, Plan
from server.training.study import Study
from tests.bench import plain, workloads
from tests.bench.figures import PLAIN, Figure
from tests.bench.measure import Times, gemm_peak, products, settle, take_turns
from tests.bench.plain import Model, PlainLoop

ROUNDS = 5  # after which accuracies are compared
PEAK = "products"


class Round:
    """One round of a study by an engine, from the same start whenever it is called; gives the new shared parts."""

    def __init__(self, study: Study, engine: str, device: str = "cpu") -> None:
        store = ClientStore.of(study, device)
        self.method = build_method(study.spec)
        self.method.net.to(device)
        self.fleet: Fleet = ENGINES[engine](store, self.method)
        self._start, self._device = to_device(steps.start(self.method), device), device

    def __call__(self) -> Parts:
        now, cohort = self.method.at(1), self.fleet.clients()
        updates = self.fleet.train(1, now, Broadcasts(now, self._start, cohort))
        shared = steps.aggregate(now, self._start, rounds.in_order(updates, cohort))
        settle(self._device)
        return shared

    def parts(self) -> Parts:
        """The shared parts after one round, and every client's own head as `<client>.head`."""
        shared = self()
        heads = {f"{id}.head": own["head"] for id, own in self.fleet.personal_state() if "head" in own}
        return {**shared, **heads}


def fedavg(turns: int) -> Figure:
    """A1: FedAvg on work A, as fast as the machine allows."""
    study = workloads.work_a()
    return beside(
        "A1",
        "FedAvg, 20 clients, two convolutions",
        2.0,
        study,
        PlainLoop(ClientStore.of(study), plain.fedavg),
        "pool",
        ("sequential",),
        turns,
    )


def half_precision(turns: int) -> Figure:
    """A2: the same with networks that compute in bf16; its accuracy after some rounds beside float32's."""
    study, rounded = workloads.work_a(), workloads.work_a(precision="bf16")
    sides = _sides(rounded, PlainLoop(ClientStore.of(study), plain.fedavg), ("pool",))
    exact, half = (_accuracy(each) for each in (study, rounded))
    times = take_turns(sides, turns)
    del times[PEAK]
    return Figure(
        "A2",
        "the same in bf16",
        3.0,
        sides=times,
        ours="pool",
        difference=abs(exact - half),
        tolerance=0.005,
        notes={"accuracy float32": exact, "accuracy bf16": half, "rounds": ROUNDS},
    )


def fedrep(turns: int) -> Figure:
    """A3: FedRep with ten epochs on its heads."""
    study = workloads.work_a("fedrep", head_epochs=10)
    opponent = PlainLoop(ClientStore.of(study), plain.fedrep(10), lambda model: model.base)
    return beside(
        "A3 FedRep",
        "FedRep, 10 head epochs on features computed once",
        8.0,
        study,
        opponent,
        "pool",
        (),
        fewer(turns),
    )


def fedcrc(turns: int) -> Figure:
    """A3: FedCRC with five epochs, as in its paper; compared after one, for more make rounding errors grow too far to compare."""

    def opponent(study: Study, epochs: int) -> PlainLoop:
        return PlainLoop(ClientStore.of(study), plain.fedcrc(epochs), lambda model: model.base)

    short, study = workloads.work_a("fedcrc"), workloads.work_a("fedcrc", epochs=5)
    what = "FedCRC, 5 epochs, heads on features computed once"
    found = beside("A3 FedCRC", what, 4.0, study, opponent(study, 5), "pool", (), fewer(turns))
    return msgspec.structs.replace(found, difference=difference(Round(short, "pool"), opponent(short, 1)))


def fewer(turns: int) -> int:
    """For workloads whose plain round takes half a minute: what disturbs a turn averages out within it."""
    return -(-turns // 2)


def linear_heads(turns: int) -> Figure:
    """A4: a hundred linear heads on features that are already there."""
    study = workloads.heads(method="fedrep", epochs=0, head_epochs=1)
    opponent = PlainLoop(ClientStore.of(study), plain.fedrep(1, epochs=0), lambda model: model.base)
    with threads(1):
        return beside(
            "A4 linear",
            "100 linear heads on 784 features",
            9.0,
            study,
            opponent,
            "vector",
            ("sequential",),
            turns,
        )


def small_networks(turns: int) -> Figure:
    """A4: a hundred networks with one hidden layer."""
    study = workloads.heads(hidden=100)
    opponent = PlainLoop(ClientStore.of(study), plain.fedavg)
    with threads(1):
        return beside(
            "A4 MLP",
            "100 networks of one hidden layer",
            6.0,
            study,
            opponent,
            "vector",
            ("sequential",),
            turns,
        )


def beside(
    id: str,
    what: str,
    target: float,
    study: Study,
    opponent: PlainLoop,
    ours: str,
    others: tuple[str, ...],
    turns: int,
    *,
    device: str = "cpu",
    tolerance: float = 1e-5,
) -> Figure:
    """The figure of an engine beside the plain loop, and other engines for comparison; first both must agree."""
    first = Round(study, ours, device)
    apart = difference(first, opponent)
    sides: dict[str, Callable[[], object]] = _sides(study, opponent, others, device) | {ours: first}
    times = take_turns(sides, turns, warm=frozenset({PLAIN, ours}))
    share = _share(study, times[ours], times.pop(PEAK))
    return Figure(id, what, target, sides=times, ours=ours, difference=apart, tolerance=tolerance, peak=share)


def difference(ours: Round, theirs: PlainLoop) -> float:
    """The largest between what both have after their first round."""
    fresh = ours.parts()
    theirs()
    return plain.difference(fresh, theirs.parts())


def _sides(
    study: Study, opponent: PlainLoop, engines: tuple[str, ...], device: str = "cpu"
) -> dict[str, Callable[[], object]]:
    return {
        PLAIN: opponent,
        **{engine: Round(study, engine, device) for engine in engines},
        PEAK: products(device),
    }


def _share(study: Study, times: Times, peak: Times) -> float | None:
    """Of the GEMM peak, for one epoch of a whole network; None for methods that do something else."""
    if study.recipe.method.name != "fedavg":
        return None
    store = ClientStore.of(study)
    images = sum(map(store.samples, store))
    return images * flops(store) / times.least / 1e9 / gemm_peak(peak)


@torch.enable_grad()
def flops(store: ClientStore) -> float:
    """Floating point operations of one image, forward and backward."""
    model, batch = Model(store), 4
    x, y = torch.zeros(batch, *store.settings.spec.input.shape), torch.zeros(batch, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(x), y).backward()
    return counter.get_total_flops() / batch


def _accuracy(study: Study) -> float:
    """Mean over clients after some rounds."""
    ready = Round(study, "pool")
    shared = steps.start(ready.method)
    for result in rounds.run(ready.method, ready.fleet, Plan(ROUNDS)):
        shared = result.shared
    found = rounds.evaluate(ready.method, ready.fleet, shared, ROUNDS)
    return math.fsum(metrics["global.test_acc"] for metrics in found.values()) / len(found)
