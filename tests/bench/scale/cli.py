"""What `python -m tests.bench.scale` is asked for, and what it prints."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence

from tests.bench.scale import runs


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints; --devices 0 or --idle 0 leaves one half out."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends it ends its children too
    parser = argparse.ArgumentParser(prog="python -m tests.bench.scale")
    parser.add_argument("--devices", type=int, default=2000)
    parser.add_argument("--full", type=int, default=400, help="how many of them train; the others fit heads")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--leave", type=float, default=0.1, help="the share that leaves for good")
    parser.add_argument("--deadline", type=float, default=90.0, help="of a round, and for heads, in seconds")
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--idle-s", type=float, default=30.0)
    asked = parser.parse_args(arguments)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if asked.devices:
        for line in runs.busy(
            asked.devices, asked.full, asked.rounds, leave=asked.leave, deadline_s=asked.deadline
        ):
            print(line, flush=True)
    if asked.idle:
        for line in runs.idle(asked.idle, asked.idle_s):
            print(line, flush=True)
