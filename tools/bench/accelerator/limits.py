"""The stacked step compared with the limits of the device: kernel launches, memory bandwidth and floating point operations.

All peaks are measured in the same run: a copy, a square matrix product and an empty kernel. Bytes are those that the operators read and
write, as if nothing stayed in a cache; views are free. The limit with the longest time applies.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from edge_fl_server.training.studies import ClientStore
from tools.bench import training, workloads
from tools.bench.accelerator import steps
from tools.bench.accelerator.scale import BATCH, Scale
from tools.bench.accelerator.steps import StackedStep
from tools.bench.figures import Figure
from tools.bench.measure import Times, gemm_peak, products, settle, take_turns

LAUNCHES = 1000


class Traffic(TorchDispatchMode):
    """Counts the operators that compute something in the block, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        in_place = func.name().partition(".")[0].endswith("_")
        memory = {tensor.untyped_storage().data_ptr() for tensor in read}
        view = bool(read) and all(tensor.untyped_storage().data_ptr() in memory for tensor in written)
        if in_place or not view:
            self.operators += 1
            self.bytes += sum(map(_size, (*read, *written)))
        return result


def figures(turns: int, at: Scale) -> Iterator[Figure]:
    """One figure per model."""
    for model in at.models:
        yield explained(model, turns, at)


def explained(model: str, turns: int, at: Scale) -> Figure:
    """The share of the stacked step's time that the nearest limit explains."""
    step = StackedStep(model, at)
    step()
    with Traffic() as traffic:
        step()
    launched = launches(step, at) if at.real else traffic.operators
    store = ClientStore.of(workloads.work_a(model=model, clients=2, samples=40))
    flop = training.flops(store) * at.clients * BATCH
    peaks = measured_peaks(turns, at)
    limits = {
        "launches": launched * peaks["launch s"],
        "bandwidth": traffic.bytes / peaks["bytes/s"],
        "FLOP": flop / peaks["FLOP/s"],
    }
    sides, failed = timed(step, turns, at)
    seconds = {name: side.median / at.steps for name, side in sides.items()}
    nearest = max(limits, key=lambda name: limits[name])
    notes: dict[str, float | str] = {
        "step ms": 1e3 * seconds["stacked"],
        "launches": float(launched),
        "operators": float(traffic.operators),
        "MB": traffic.bytes / 1e6,
        "GFLOP": flop / 1e9,
        "us per launch": 1e6 * peaks["launch s"],
        "GB/s of a copy": peaks["bytes/s"] / 1e9,
        "GFLOP/s of a product": peaks["FLOP/s"] / 1e9,
        **{f"ms by {name}": 1e3 * limit for name, limit in limits.items()},
    }
    if "graph" in seconds:
        replayed = max(limits["bandwidth"], limits["FLOP"], launched * peaks["replay s"])
        notes |= {
            "step as a graph, ms": 1e3 * seconds["graph"],
            "us per replayed launch": 1e6 * peaks["replay s"],
            "share of the graph's time": f"{replayed / seconds['graph']:.0%}",
        }
    notes |= failed
    what = f"stacked step of {at.clients} clients, {model}; nearest limit: {nearest}"
    share = 100 * limits[nearest] / seconds["stacked"]
    return Figure(f"limits {model}", what, unit=" % of the time", value=share, sides=sides, notes=notes)


def timed(step: StackedStep, turns: int, at: Scale) -> tuple[dict[str, Times], dict[str, str]]:
    """Times of `at.steps` steps, eager and on a GPU as a CUDA graph, and why there is no graph."""
    ways: dict[str, Callable[[], object]] = {"stacked": step}
    failed: dict[str, str] = {}
    with steps.fastest_kernels():
        if at.real:
            try:
                ways["graph"] = steps.graph(step)
            except RuntimeError as error:
                failed["graph"] = f"failed: {str(error).splitlines()[0]}"
        return take_turns({name: steps.repeated(way, at) for name, way in ways.items()}, turns), failed


def measured_peaks(turns: int, at: Scale) -> dict[str, float]:
    """Seconds per launch of a small operator, bytes per second of a copy, FLOP per second of a product.

    On a GPU the product uses TF32, as cuDNN's convolutions do; a launch is measured eagerly and replayed in a CUDA graph.
    """
    source = torch.rand(at.copied, device=at.device)
    target, one = torch.empty_like(source), torch.zeros(1, device=at.device)

    def copy() -> None:
        target.copy_(source)
        settle(at.device)

    def small() -> None:
        for _ in range(LAUNCHES):
            one.add_(1.0)

    def launch() -> None:
        small()
        settle(at.device)

    sides: dict[str, Callable[[], object]] = {
        "copy": copy,
        "launch": launch,
        "gemm": products(at.device, at.gemm),
    }
    if at.real:
        sides["replay"] = steps.repeated(steps.graph(small), replace(at, steps=1))
    with tensor_cores():
        times = take_turns(sides, turns)
    return {
        "bytes/s": 2 * source.nbytes / times["copy"].least,
        "FLOP/s": 1e9 * gemm_peak(times["gemm"], at.gemm),
        **{f"{name} s": times[name].least / LAUNCHES for name in ("launch", "replay") if name in times},
    }


def launches(step: StackedStep, at: Scale) -> int:
    """Number of kernels and copies that a step starts on a GPU."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        settle(at.device)
    return sum(event.count for event in seen.key_averages() if event.device_type.name == "CUDA")


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Allow TF32 in matrix products in the block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _size(tensor: Tensor) -> int:
    """Bytes of memory that a tensor refers to; an expanded tensor's values count once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
