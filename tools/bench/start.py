"""Start-up: seconds until the first round of `edge-fl simulate` has ended, and the peak memory of all its processes."""

import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from edge_fl.inputs import InputSpec
from tools.bench import workloads
from tools.bench.figures import Figure
from tools.bench.measure import MEGABYTE, anonymous_bytes, file_bytes

DATASET, IMAGES, CLIENTS, ROUNDS = "work-a", 5615, 20, 40
LOOK_S = 0.1  # between two looks at the results
LOOKS_PER_SAMPLE = 5  # of the memory, which takes time from the run
AFTER_S = 5.0  # of the following rounds, for the peak memory
DEADLINE_S = 120.0


def first_round(turns: int) -> Figure:
    """FedAvg on work A by the command, from its start to the first line of round metrics; engine "auto", without evaluation."""
    with TemporaryDirectory(prefix="edge-fl-bench-") as name:
        folder = Path(name)
        images = workloads.images(IMAGES, InputSpec((3, 32, 32))).samples
        np.savez(folder / f"{DATASET}.npz", x=images.x, y=images.y)
        runs = [_run(folder, number) for number in range(turns + 1)][
            1:
        ]  # the first one reads modules from the disk
    seconds, megabytes = ([run[place] for run in runs] for place in (0, 1))
    notes = {
        "slowest, s": round(max(seconds), 2),
        "peak of all processes, MB": round(max(megabytes)),
        "runs": turns,
    }
    what = f"start of simulate to the end of the first round of {CLIENTS} clients"
    return Figure("start", what, 5.0, " s", at_most=True, value=statistics.median(seconds), notes={**notes})


def _run(folder: Path, number: int) -> tuple[float, float]:
    """(seconds to the end of the first round, peak memory in MB) of one run, which is then ended."""
    runs = folder / str(number)
    command = [sys.executable, "-m", "edge_fl", "simulate", "--method", "fedavg", "--dataset", DATASET]
    command += [
        "--data-dir",
        str(folder),
        "--clients",
        str(CLIENTS),
        "--set",
        "data.beta=0.1",
        "--model",
        "cnn2",
    ]
    command += ["--rounds", str(ROUNDS), "--set", "evaluate_every=0", "--set", "method.batch_size=10"]
    start, first, looks, most = time.monotonic(), 0.0, 0, 0
    with subprocess.Popen(
        [*command, "--runs", str(runs)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None and time.monotonic() < (
            start + DEADLINE_S if not first else start + first + AFTER_S
        ):
            if not first and any(path.stat().st_size for path in runs.glob("*/round_metrics.jsonl")):
                first = time.monotonic() - start
            if looks % LOOKS_PER_SAMPLE == 0:
                most = max(most, anonymous_bytes(process.pid))
            looks += 1
            time.sleep(LOOK_S)
        peak = most + file_bytes(process.pid)
        process.terminate()
    if not first:
        raise RuntimeError(f"no round ended within {DEADLINE_S:.0f} s of {' '.join(command)}")
    return first, peak / MEGABYTE
