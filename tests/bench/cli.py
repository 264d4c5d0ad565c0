"""`make bench`, `make bench-full` and `make bench-gpu`: figures side by side in one run, as a table, as JSON and as a picture."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from edge_fl import heads
from edge_fl.errors import ConnectError
from edge_fl.files import atomic
from tests.bench import cohort, gpu, measure, messages, plot, releasing, table, training
from tests.bench.figures import Figure, Report

FIGURES: dict[str, Callable[[int], Figure]] = {
    "fedavg": training.fedavg,
    "half-precision": training.half_precision,
    "fedrep": training.fedrep,
    "fedcrc": training.fedcrc,
    "linear-heads": training.linear_heads,
    "small-networks": training.small_networks,
    "cohorts": cohort.cohorts,
    "round-trip": messages.round_trip,
    **{f"head-{kind}": partial(releasing.head, kind) for kind in heads.HEADS if kind != "constant"},
    **{f"release-{model}": partial(releasing.released, model) for model in releasing.MODELS},
}
FULL: dict[str, Callable[[int], Figure]] = {
    "release-mobilenet": partial(releasing.released, "mobilenet"),
}
TURNS, FULL_TURNS = 2, 9
NO_GPU = (
    "no GPU here: everything runs on the CPU at tiny sizes, to show that it works; the figures mean nothing"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the figures that are asked for (default: all)."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("figures", nargs="*", help=f"some of {', '.join((*FIGURES, *FULL))}; default: all")
    parser.add_argument(
        "--full", action="store_true", help=f"{FULL_TURNS} turns instead of {TURNS}, and {', '.join(FULL)}"
    )
    parser.add_argument("--gpu", action="store_true", help="the figures for a GPU, and no others")
    parser.add_argument("--turns", type=int, default=0, help="how often the sides take turns")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="the folder for the report")
    asked = parser.parse_args(arguments)
    known = {**FIGURES, **FULL}
    if unknown := [name for name in asked.figures if name not in known]:
        parser.error(f"unknown figure {unknown[0]!r}, expected {', '.join(known)}")
    turns = asked.turns or (FULL_TURNS if asked.full else TURNS)
    at = gpu.scale() if asked.gpu else gpu.TINY
    if asked.gpu and not at.real:
        print(NO_GPU)
    load = os.getloadavg()[0]
    names = asked.figures or (known if asked.full else FIGURES)
    found = gpu.figures(turns, at) if asked.gpu else measured({name: known[name] for name in names}, turns)
    figures = list(_told(found))
    peak = measure.gemm_peak(measure.take_turns({"": measure.products(at.device)}, turns)[""])
    report = Report(measure.machine(load, peak, at.device), figures)
    print()
    print(table.render(report))
    save(report, asked.out)
    print(f"\nwritten to {asked.out}")


def save(report: Report, folder: Path) -> None:
    """bench.json, bench.txt, and where there is something to show bench.svg and bench.png."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write(folder / "bench.json", msgspec.json.format(msgspec.json.encode(report)))
    atomic.write(folder / "bench.txt", table.render(report).encode())
    plot.save(report, folder)


def measured(figures: Mapping[str, Callable[[int], Figure]], turns: int) -> Iterator[Figure]:
    """One after the other; one that needs a broker where there is none is told and left out."""
    for name, measure_it in figures.items():
        try:
            yield measure_it(turns)
        except ConnectError as error:
            print(f"{name}: {error}", flush=True)


def _told(figures: Iterator[Figure]) -> Iterator[Figure]:
    """The figures, each named as soon as it is there."""
    for figure in figures:
        print(" ".join(cell for cell in table.row(figure)[:5] if cell), flush=True)
        yield figure
