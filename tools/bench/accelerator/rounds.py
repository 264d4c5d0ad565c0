"""A6: rounds of the vectorised engine compared with the plain loop on the same accelerator, with a profile of their time."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from torch.profiler import ProfilerActivity, profile

from edge_fl_server.training.studies import ClientStore, Study
from tools.bench import plain, training, workloads
from tools.bench.accelerator.scale import Scale, forget_peak, peak_mb
from tools.bench.figures import Figure
from tools.bench.measure import settle
from tools.bench.plain import PlainLoop
from tools.bench.training import Round

SHOWN = 6
TOLERANCE = 1e-4  # TF32 convolutions
TOLERANCE_NORM = 1e-2  # BatchNorm on ten images


def federations(at: Scale) -> dict[str, tuple[float, Callable[[], Study]]]:
    """Workloads by name, each with its target (0: none)."""
    size: dict[str, Any] = {"clients": at.clients, "samples": at.samples}
    return {
        "cnn2": (15.0, lambda: workloads.work_a(**size)),
        "cnn2 many": (50.0, lambda: workloads.many(at.many)),
        "heads": (100.0, lambda: workloads.heads(clients=at.many, samples=73 * at.many)),
        **{name: (0.0, partial(workloads.work_a, model=name, **size)) for name in at.deep},
    }


def figures(turns: int, at: Scale, names: Sequence[str] = ()) -> Iterator[Figure]:
    """The workloads `names` (default: all)."""
    for name, (target, study) in federations(at).items():
        if not names or name in names:
            yield compared(name, target, study(), turns, at)


def compared(name: str, target: float, study: Study, turns: int, at: Scale) -> Figure:
    """A round of the vectorised engine compared with the plain loop."""
    opponent = PlainLoop(ClientStore.of(study, at.device), plain.fedavg, device=at.device)
    tolerance = TOLERANCE_NORM if study.recipe.model.name.startswith("resnet") else TOLERANCE
    what = f"a round of {len(study.split.clients)} clients on {at.device}"
    figure = Figure(f"A6 {name}", what, target, ours="vector", tolerance=tolerance)
    figure = training.compared(figure, study, opponent, turns, ("sequential",), at.device)
    del opponent
    forget_peak(at.device)
    once = Round(study, "vector", at.device)
    notes = operations(once, at)
    return msgspec.structs.replace(figure, notes={"peak MB": peak_mb(at.device), **notes})


def operations(once: Round, at: Scale) -> dict[str, float | str]:
    """The most expensive operations of a second round, by their share of its time on the device."""
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
