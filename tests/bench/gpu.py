"""A6: the vectorised engine compared with the plain loop on the same accelerator, and the effect of CUDA graphs and torch.compile.

Without a GPU everything runs on the CPU at tiny sizes and without targets, as a test of the benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.func import functional_call, grad, replace_all_batch_norm_modules_, vmap
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from edge_fl_server.training.client_store import ClientStore
from edge_fl_server.training.study import Study
from tests.bench import plain, training, workloads
from tests.bench.figures import PLAIN, Figure
from tests.bench.measure import settle, take_turns
from tests.bench.plain import Model, PlainLoop
from tests.bench.training import Round

Params = Mapping[str, Tensor]
# TF32 convolutions, and BatchNorm on ten images
TOLERANCES = {"cnn2": 1e-4, "resnet18": 1e-2, "resnet34": 1e-2}
BATCH, SHOWN = 10, 6


@dataclass(frozen=True)
class Scale:
    """Device and sizes: `clients` and `samples` of work A, `many` equal clients."""

    device: str
    clients: int
    samples: int
    many: int
    steps: int
    backend: str  # of torch.compile

    @property
    def real(self) -> bool:
        """Whether the figures are meaningful."""
        return self.device != "cpu"


FULL = Scale("cuda", 20, 4492, 100, 20, "inductor")
TINY = Scale("cpu", 2, 32, 3, 1, "eager")


def scale() -> Scale:
    """The full scale if there is a GPU, else the tiny one."""
    return FULL if torch.cuda.is_available() else TINY


def federations(at: Scale) -> dict[str, tuple[float, Callable[[], Study]]]:
    """Workloads by name, each with its target."""
    size: dict[str, Any] = {"clients": at.clients, "samples": at.samples}
    return {
        "cnn2": (15.0, lambda: workloads.work_a(**size)),
        "cnn2 many": (50.0, lambda: workloads.many(at.many)),
        "heads": (100.0, lambda: workloads.heads(clients=at.many, samples=73 * at.many)),
        "resnet18": (0.0, lambda: workloads.work_a(model="resnet18", **size)),
        "resnet34": (0.0, lambda: workloads.work_a(model="resnet34", **size)),
    }


def figures(turns: int, at: Scale) -> Iterator[Figure]:
    """Whole rounds, then single steps."""
    for name, (target, study) in federations(at).items():
        yield rounds(name, target if at.real else 0.0, study(), turns, at)
    for model in TOLERANCES:
        yield steps(model, turns, at)


def rounds(name: str, target: float, study: Study, turns: int, at: Scale) -> Figure:
    """A round of the vectorised engine compared with the plain loop, with a profile of its time."""
    opponent = PlainLoop(ClientStore.of(study, at.device), plain.fedavg, device=at.device)
    tolerance = TOLERANCES.get(study.recipe.model.name, 1e-4)
    what = f"a round of {len(study.split.clients)} clients on {at.device}"
    figure = Figure(f"A6 {name}", what, target, ours="vector", tolerance=tolerance)
    figure = training.compared(figure, study, opponent, turns, ("sequential",), at.device)
    return msgspec.structs.replace(figure, notes=limits(Round(study, "vector", at.device), at))


def limits(once: Round, at: Scale) -> dict[str, float | str]:
    """The most expensive operations of a round, by their share of its time on the device."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if at.real else [])]
    once()
    with profile(activities=kinds) as seen:
        once()
        settle(at.device)
    key = "self_device_time_total" if at.real else "self_cpu_time_total"
    spent = {event.key: float(getattr(event, key)) for event in seen.key_averages()}
    total = sum(spent.values()) or 1.0
    top = sorted(spent, key=lambda name: -spent[name])[:SHOWN]
    return {name: f"{spent[name] / total:.0%}" for name in top}


def steps(model: str, turns: int, at: Scale) -> Figure:
    """Single steps of equal clients with one batch each: one after the other, stacked, compiled, and as a CUDA graph."""
    net = Model(ClientStore.of(workloads.work_a(model=model, clients=2, samples=40))).to(at.device)
    replace_all_batch_norm_modules_(net)
    stacked = {name: t.detach().expand(at.clients, *t.shape).clone() for name, t in net.named_parameters()}
    x = torch.rand(at.clients, BATCH, 3, 32, 32, device=at.device)
    y = torch.randint(0, workloads.CLASSES, (at.clients, BATCH), device=at.device)

    def loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, dict(params), (x,)), y)

    def each(params: Params, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {name: params[name] - workloads.LR * g for name, g in grad(loss)(params, x, y).items()}

    def one_by_one() -> None:
        for place in range(at.clients):
            each({name: t[place] for name, t in stacked.items()}, x[place], y[place])

    together = vmap(each)
    compiled = torch.compile(together, backend=at.backend)
    ways: dict[str, Callable[[], object]] = {
        PLAIN: one_by_one,
        "stacked": partial(together, stacked, x, y),
        "compiled": partial(compiled, stacked, x, y),
    }
    if at.real:
        ways["graph"] = partial(_graph(partial(together, stacked, x, y)).replay)
    with fastest_kernels():
        tried = {name: way for name, way in ways.items() if name == PLAIN or not _fails(way)}
        times = take_turns({name: _repeated(way, at) for name, way in tried.items()}, turns)
    best = min((name for name in times if name != PLAIN), key=lambda name: times[name].median)
    missing: dict[str, float | str] = dict.fromkeys(ways.keys() - tried.keys(), "failed")
    what = f"{at.steps} steps of {at.clients} clients, {model}; best: {best}"
    return Figure(f"A6 step {model}", what, sides=times, ours=best, notes=missing)


@contextmanager
def fastest_kernels() -> Iterator[None]:
    """Let cuDNN search for its fastest kernels in the block."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _repeated(way: Callable[[], object], at: Scale) -> Callable[[], None]:
    def several() -> None:
        for _ in range(at.steps):
            way()
        settle(at.device)

    return several


def _fails(way: Callable[[], object]) -> bool:
    """Whether torch does not support it; the report shows it as failed."""
    try:
        way()
    except Exception:
        return True
    return False


def _graph(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture a step after some runs on a separate stream, as torch requires."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
