"""`make bench`: every figure, side by side in one run, as a table and as JSON."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from edge_fl import atomic
from server.bench import training
from server.bench.figures import Figure
from server.bench.measure import gemm_peak

FIGURES: dict[str, Callable[[int], Figure]] = {
    "fedavg": training.fedavg,
    "half-precision": training.half_precision,
    "fedrep": training.fedrep,
    "fedcrc": training.fedcrc,
    "linear-heads": training.linear_heads,
    "small-networks": training.small_networks,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the figures that are asked for (default: all)."""
    parser = argparse.ArgumentParser(prog="python -m server.bench")
    parser.add_argument("figures", nargs="*", help=f"some of {', '.join(FIGURES)}; default: all")
    parser.add_argument("--turns", type=int, default=2, help="how often the sides take turns")
    parser.add_argument("--out", type=Path, default=Path("runs/bench.json"))
    asked = parser.parse_args(arguments)
    if unknown := [name for name in asked.figures if name not in FIGURES]:
        parser.error(f"unknown figure {unknown[0]!r}, expected {', '.join(FIGURES)}")
    print(f"GEMM peak {gemm_peak():.0f} GFLOP/s, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    found = []
    for name in asked.figures or FIGURES:
        figure = FIGURES[name](asked.turns)
        found.append(figure)
        print(line(figure), flush=True)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(asked.out, msgspec.json.format(msgspec.json.encode(found)))
    print(f"written to {asked.out}")


def line(figure: Figure) -> str:
    """A figure as a line: what was found, its target, the difference between the sides, the share of the peak."""
    equal = "" if figure.difference is None else f", difference {figure.difference:.1e}"
    peak = "" if figure.peak is None else f", {figure.peak:.0%} of the GEMM peak"
    found = f"{figure.found:.2f}{figure.unit}" if figure.comparable else "-"
    return f"{figure.id}  {figure.what}: {found} (target {figure.target:g}{figure.unit}) {figure.verdict}{equal}{peak}"
