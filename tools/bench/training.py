"""A1 to A4: whole rounds of local training by each engine, compared with the plain loop on the same batches."""

import math
from collections.abc import Callable
from functools import partial

import msgspec
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from edge_fl.learn.tree import Parts, to_device
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl_server.training import rounds
from edge_fl_server.training.clients import Broadcasts, Clients
from edge_fl_server.training.engines import choice
from edge_fl_server.training.engines.processes import threads
from edge_fl_server.training.rounds import Plan
from edge_fl_server.training.studies import ClientStore, Study
from tools.bench import plain, workloads
from tools.bench.figures import PLAIN, Figure
from tools.bench.measure import Times, gemm_peak, products, settle, take_turns
from tools.bench.plain import Model, PlainLoop

ROUNDS = 5  # until accuracies are compared
LONG = 1000  # rounds of a run in which the start of an engine does not matter
PEAK = "products"


class Round:
    """One round of a study by an engine, always from the same start; a call returns the new shared parts."""

    def __init__(self, study: Study, engine: str, device: str = "cpu") -> None:
        store = ClientStore.of(study, device)
        self.method = build_method(study.spec)
        self.method.net.to(device)
        self.fleet: Clients = choice.build(engine, store, self.method, Plan(LONG), lambda line: None)  # type: ignore[arg-type]
        self._start, self._device = to_device(steps.start(self.method), device), device

    def __call__(self) -> Parts:
        now, cohort = self.method.at(1), self.fleet.ids()
        updates = self.fleet.each(
            "train", 1, now, Broadcasts(partial(steps.broadcast, now, self._start), cohort)
        )
        shared = steps.aggregate(now, self._start, rounds.in_order(updates, cohort))
        settle(self._device)
        return shared

    def parts(self) -> Parts:
        """The shared parts after one round, and every client's own head as `<client>.head`."""
        shared = self()
        heads = {f"{id}.head": own["head"] for id, own in self.fleet.personal_state() if "head" in own}
        return {**shared, **heads}


def fedavg(turns: int) -> Figure:
    """A1: FedAvg on work A."""
    study = workloads.work_a()
    figure = Figure("A1", "FedAvg, 20 clients, two convolutions", 1.9, ours="pool")
    return compared(figure, study, PlainLoop(ClientStore.of(study), plain.fedavg), turns, ("sequential",))


def half_precision(turns: int) -> Figure:
    """A2: the same in bf16, with its accuracy compared with float32's."""
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
    figure = Figure("A3 FedRep", "FedRep, 10 head epochs on features computed once", 7.0, ours="pool")
    return compared(figure, study, opponent, fewer(turns))


def fedcrc(turns: int) -> Figure:
    """A3: FedCRC with five epochs, as in its paper; weights are compared after one, before rounding errors grow too large.

    They grow by a factor of a thousand even so: the plain loop from weights moved by one unit in the last place ends 4e-4 away.
    """

    def opponent(study: Study, epochs: int) -> PlainLoop:
        return PlainLoop(ClientStore.of(study), plain.fedcrc(epochs), lambda model: model.base)

    short, study = workloads.work_a("fedcrc"), workloads.work_a("fedcrc", epochs=5)
    figure = Figure(
        "A3 FedCRC", "FedCRC, 5 epochs, heads on features computed once", 4.0, ours="pool", tolerance=1e-4
    )
    figure = compared(figure, study, opponent(study, 5), fewer(turns))
    return msgspec.structs.replace(figure, difference=difference(Round(short, "pool"), opponent(short, 1)))


def fewer(turns: int) -> int:
    """Half the turns, for workloads whose plain round takes half a minute: disturbances average out within a turn."""
    return -(-turns // 2)


def linear_heads(turns: int) -> Figure:
    """A4: a hundred linear heads on given features."""
    study = workloads.heads(method="fedrep", epochs=0, head_epochs=1)
    opponent = PlainLoop(ClientStore.of(study), plain.fedrep(1, epochs=0), lambda model: model.base)
    figure = Figure("A4 linear", "100 linear heads on 784 features", 6.0, ours="auto")
    with threads(1):
        return compared(figure, study, opponent, turns, ("sequential",))


def small_networks(turns: int) -> Figure:
    """A4: a hundred networks with one hidden layer."""
    study = workloads.heads(hidden=100)
    opponent = PlainLoop(ClientStore.of(study), plain.fedavg)
    figure = Figure("A4 MLP", "100 networks of one hidden layer", 3.5, ours="auto")
    with threads(1):
        return compared(figure, study, opponent, turns, ("sequential",))


def compared(
    figure: Figure,
    study: Study,
    opponent: PlainLoop,
    turns: int,
    others: tuple[str, ...] = (),
    device: str = "cpu",
) -> Figure:
    """Measure the engine `figure.ours` against the plain loop, and `others` for reference, after comparing the weights of both sides."""
    first = Round(study, figure.ours, device)
    apart = difference(first, opponent)
    sides: dict[str, Callable[[], object]] = _sides(study, opponent, others, device) | {figure.ours: first}
    times = take_turns(sides, turns, warm=frozenset({PLAIN, figure.ours}))
    share = _share(study, times[figure.ours], times.pop(PEAK))
    notes = {"engine": first.fleet.engine} if figure.ours == "auto" else {}
    return msgspec.structs.replace(figure, sides=times, difference=apart, peak=share, notes={**notes})


def difference(ours: Round, theirs: PlainLoop) -> float:
    """The largest difference between the parts of both after their first round."""
    parts = ours.parts()
    theirs()
    return plain.difference(parts, theirs.parts())


def _sides(
    study: Study, opponent: PlainLoop, engines: tuple[str, ...], device: str = "cpu"
) -> dict[str, Callable[[], object]]:
    return {
        PLAIN: opponent,
        **{engine: Round(study, engine, device) for engine in engines},
        PEAK: products(device),
    }


def _share(study: Study, times: Times, peak: Times) -> float | None:
    """Share of the GEMM peak, for one epoch of a whole network; None for other methods."""
    if study.recipe.method.name != "fedavg":
        return None
    store = ClientStore.of(study)
    images = sum(map(store.samples, store))
    return images * flops(store) / times.least / 1e9 / gemm_peak(peak)


@torch.enable_grad()
def flops(store: ClientStore) -> float:
    """Floating point operations for one image, forward and backward."""
    model, batch = Model(store), 4
    x, y = torch.zeros(batch, *store.settings.spec.input.shape), torch.zeros(batch, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(x), y).backward()
    return counter.get_total_flops() / batch


def _accuracy(study: Study) -> float:
    """Mean accuracy over clients after `ROUNDS` rounds."""
    one_round = Round(study, "pool")
    shared = steps.start(one_round.method)
    for result in rounds.run(one_round.method, one_round.fleet, Plan(ROUNDS)):
        shared = result.shared
    reports = rounds.evaluate(one_round.method, one_round.fleet, shared, ROUNDS)
    return math.fsum(metrics["global.test_acc"] for metrics in reports.values()) / len(reports)
