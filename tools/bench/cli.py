"""`make bench`, `make bench-full` and `make bench-gpu`: measure figures and write them as a table, JSON and a plot."""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from edge_fl import heads
from edge_fl.errors import ConnectError
from edge_fl.files import atomic
from tools.bench import (
    backbone,
    cohort,
    measure,
    messages,
    operators,
    plot,
    regret,
    releasing,
    start,
    table,
    training,
)
from tools.bench.accelerator import items
from tools.bench.accelerator.scale import TINY, scale
from tools.bench.figures import Figure, Report

FIGURES: dict[str, Callable[[int], Figure]] = {
    "fedavg": training.fedavg,
    "operators": operators.limiting,
    "half-precision": training.half_precision,
    "fedrep": training.fedrep,
    "fedcrc": training.fedcrc,
    "linear-heads": training.linear_heads,
    "small-networks": training.small_networks,
    "regret": regret.regret,
    "regret-busy": regret.regret_busy,
    "start": start.first_round,
    "cohorts": cohort.cohorts,
    "round-trip": messages.round_trip,
    **{f"head-{kind}": partial(releasing.head, kind) for kind in heads.HEADS if kind != "constant"},
    **{f"release-{model}": partial(releasing.released, model) for model in releasing.MODELS},
    "backbone": backbone.extraction,
    "predict-photos": partial(backbone.prediction, "photos of 12 megapixels"),
    "predict-small": partial(backbone.prediction, "pictures of 96 pixels"),
}
FULL: dict[str, Callable[[int], Figure]] = {
    "release-mobilenet": partial(releasing.released, "mobilenet"),
}
TURNS, FULL_TURNS = 2, 9


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the given figures (default: all)."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=__doc__)
    parser.add_argument(
        "figures",
        nargs="*",
        help=f"some of {', '.join((*FIGURES, *FULL))}, or with --gpu {', '.join(items.ITEMS)}; default: all",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help=f"{FULL_TURNS} turns instead of {TURNS}, and also {', '.join(FULL)}",
    )
    parser.add_argument("--gpu", action="store_true", help="only the figures for a GPU")
    parser.add_argument("--pfllib", default="", help="with --gpu: checkout of PFLlib to compare with")
    parser.add_argument("--turns", type=int, default=0, help="number of measurements of each side")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the report")
    options = parser.parse_args(arguments)
    known = items.ITEMS if options.gpu else {**FIGURES, **FULL}
    if unknown := [name for name in options.figures if name not in known]:
        parser.error(f"unknown figure {unknown[0]!r}, expected {', '.join(known)}")
    at = scale() if options.gpu else TINY
    remark = items.NO_GPU if options.gpu and not at.real else ""
    turns = options.turns or (FULL_TURNS if options.full else 1 if remark else TURNS)
    names = options.figures or (known if options.full or options.gpu else FIGURES)
    load, failed = os.getloadavg()[0], list[str]()
    if options.gpu:
        checkout = Path(options.pfllib) if options.pfllib else None
        results = items.figures(names, turns, at, checkout, failed)
    else:
        results = measured({name: {**FIGURES, **FULL}[name] for name in names}, turns)
    if remark:
        print(remark)
    figures = list(_printed(results))
    peak = measure.gemm_peak(measure.take_turns({"": measure.products(at.device)}, turns)[""])
    report = Report(measure.machine(load, peak, at.device), figures, remark)
    print()
    print(table.render(report))
    save(report, options.out)
    print(f"\nreport: {options.out}")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def save(report: Report, folder: Path) -> None:
    """Write bench.json, bench.txt and, if a figure can be plotted, bench.pdf, bench.svg and bench.png."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write(folder / "bench.json", msgspec.json.format(msgspec.json.encode(report)))
    atomic.write(folder / "bench.txt", table.render(report).encode())
    plot.save(report, folder)


def measured(figures: Mapping[str, Callable[[int], Figure]], turns: int) -> Iterator[Figure]:
    """Measure one figure after the other; without a broker, those that need one are skipped with a message."""
    for name, measure_it in figures.items():
        try:
            yield measure_it(turns)
        except ConnectError as error:
            print(f"{name}: {error}", flush=True)


def _printed(figures: Iterator[Figure]) -> Iterator[Figure]:
    """Print each figure as soon as it is measured."""
    for figure in figures:
        print(" ".join(cell for cell in table.row(figure)[:5] if cell), flush=True)
        yield figure
