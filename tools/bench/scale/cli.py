"""The command line of the scale benchmark."""

import argparse
import os
import signal
from collections.abc import Sequence

from tools.bench.scale import runs


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; --devices 0 or --idle 0 skips one half."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the children too
    parser = argparse.ArgumentParser(prog="python -m tools.bench.scale")
    parser.add_argument("--devices", type=int, default=2000)
    parser.add_argument("--full", type=int, default=400, help="how many of them train; the others fit heads")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--leave", type=float, default=0.1, help="share of the devices that leaves for good")
    parser.add_argument(
        "--deadline", type=float, default=90.0, help="deadline of a round, and for heads, in seconds"
    )
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--idle-s", type=float, default=30.0)
    options = parser.parse_args(arguments)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if options.devices:
        for line in runs.busy(
            options.devices, options.full, options.rounds, leave=options.leave, deadline_s=options.deadline
        ):
            print(line, flush=True)
    if options.idle:
        for line in runs.idle(options.idle, options.idle_s):
            print(line, flush=True)
