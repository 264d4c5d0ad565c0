"""`make bench-peers`: measure all sides of the given methods in turns; write runs/bench/peers.json and peers.md."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from edge_fl.files import atomic
from tools.bench import measure
from tools.bench.peers import report
from tools.bench.peers.cases import CASES
from tools.bench.peers.compare import commands, compared
from tools.bench.peers.report import Report

TURNS = 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the given methods (default: all)."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.peers", description=__doc__)
    parser.add_argument(
        "--pfllib", type=Path, help="checkout of PFLlib (docs/pfllib.md); without it PFLlib is left out"
    )
    parser.add_argument(
        "--methods", default=",".join(CASES), help=f"some of {', '.join(CASES)}; default: all"
    )
    parser.add_argument(
        "--turns", type=int, default=TURNS, help=f"rounds of each side that count, default {TURNS}"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, as a test of the benchmark")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the report")
    options = parser.parse_args(arguments)
    names = options.methods.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"unknown method {unknown[0]!r}, expected {', '.join(CASES)}")
    if options.pfllib and not (options.pfllib / "system" / "flcore").is_dir():
        parser.error(f"{options.pfllib}: no folder system/flcore, expected a checkout of PFLlib")
    load = os.getloadavg()[0]
    peak = measure.gemm_peak(measure.take_turns({"": measure.products()}, 2)[""])
    cases = []
    for name in names:
        cases.append(compared(name, commands(CASES[name], options.pfllib), options.turns, options.quick))
        for row in report.rows(cases[-1]):
            print(" | ".join(row), flush=True)
        save(Report(measure.machine(load, peak, "cpu"), cases), options.out)
    print(f"\nreport: {options.out / 'peers.md'}")


def save(results: Report, folder: Path) -> None:
    """Write peers.json and peers.md."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write(folder / "peers.json", msgspec.json.format(msgspec.json.encode(results)))
    atomic.write(folder / "peers.md", report.markdown(results).encode())
