"""The items of the GPU benchmark by name, each with a statement of what it measures on a GPU and its target."""

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tools.bench.accelerator import limits, memory, published, quickstart, rounds, steps
from tools.bench.accelerator.scale import Scale
from tools.bench.figures import Figure

NO_GPU = (
    "no GPU: every item runs on the CPU at tiny sizes, as a test of the benchmark; the numbers are not results, "
    "'on a GPU' says what each item measures"
)


@dataclass(frozen=True)
class Item:
    """`measure` takes (turns, scale, checkout of PFLlib or None); `goal` states what it measures on a GPU and the target."""

    goal: str
    measure: Callable[[int, Scale, Path | None], Iterator[Figure]]


ITEMS = {
    "quick-start": Item(
        "seconds of a round of PFLlib's quick start (MNIST, 20 clients, batch 10, FedAvg, two convolutions, 52,500 training "
        "images) with evaluation, PFLlib's main.py (PFLLIB=DIR) divided by edge-fl's vectorised engine on the same GPU; "
        "target: at least 30x",
        quickstart.figures,
    ),
    "published": Item(
        "wall-clock time of BlazeFL's published benchmark (CIFAR-10, 100 clients, 5 rounds of 5 epochs, batch 50, small "
        "network; about 24.5 s on four GPUs); target: at most 5 s",
        lambda turns, at, checkout: published.figures(turns, at),
    ),
    "rounds": Item(
        "A6: a round of the vectorised engine compared with the plain loop on the same GPU; targets: at least 15x for 20 "
        "clients of work A, 50x for 100 equal clients, 100x for 100 heads; ResNet-18 and ResNet-34 without a target",
        lambda turns, at, checkout: rounds.figures(turns, at),
    ),
    "limits": Item(
        "the stacked step of 20 clients: time, kernel launches, bytes moved and FLOP, compared with the launch cost, the "
        "bandwidth of a copy and the speed of a matrix product on the same GPU; states which limit applies; no target",
        lambda turns, at, checkout: limits.figures(turns, at),
    ),
    "steps": Item(
        "the stacked step compiled by torch.compile, as a CUDA graph, and both, compared with the eager one and with the "
        "steps of single clients; no target: the engine uses what helps",
        lambda turns, at, checkout: steps.figures(turns, at),
    ),
    "memory": Item(
        "clients per chunk that ClientCapacity finds for 1,500 clients of two convolutions, 300 of ResNet-18 and 200 of "
        "ResNet-34, and the peak of the GPU's memory; no target",
        lambda turns, at, checkout: memory.figures(turns, at),
    ),
}


def figures(
    names: Iterable[str], turns: int, at: Scale, checkout: Path | None, failed: list[str]
) -> Iterator[Figure]:
    """Measure the items `names`; one that fails is added to `failed` with its traceback printed, and the others go on."""
    for name in names:
        item = ITEMS[name]
        try:
            for number, figure in enumerate(item.measure(turns, at, checkout)):
                yield figure if at.real else tiny(figure, item.goal if number == 0 else "")
        except Exception:
            traceback.print_exc()
            failed.append(name)


def tiny(figure: Figure, goal: str) -> Figure:
    """A figure of a run without a GPU: no target, and what its item would measure."""
    stated = {"on a GPU": goal} if goal else {}
    return msgspec.structs.replace(figure, target=0.0, notes={**figure.notes, **stated})
