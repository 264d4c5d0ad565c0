"""PFLlib's side of the quick start: its own main.py from a checkout, unmodified, in a child process on our data in its format.

The child works in a temporary folder, because PFLlib reads `../dataset` and writes `../results` and `models`. Nothing of PFLlib is part of
this repository.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge_fl.errors import InputError
from edge_fl_server.training.studies import Study

DATASET = "MNIST"
DEADLINE_S = 1800.0
TIME = re.compile(r"time cost -+ ([0-9.eE+-]+)$", re.MULTILINE)
ACCURACY = re.compile(r"Averaged Test Accuracy: ([0-9.]+)")


class Output(NamedTuple):
    """Seconds of each round and the accuracy of the last evaluation, as PFLlib prints them."""

    seconds: list[float]
    accuracy: float


def train(checkout: Path, study: Study, device: str, rounds: int, evaluate_every: int) -> Output:
    """Train FedAvg with the arguments of PFLlib's quick start. Raises InputError.

    Rounds are counted from 0; those that `evaluate_every` divides begin with an evaluation.
    """
    main = (checkout / "system" / "main.py").resolve()
    if not main.is_file():
        raise InputError(f"{checkout}: no file system/main.py, expected a checkout of PFLlib")
    with tempfile.TemporaryDirectory(prefix="edge-fl-bench-") as name:
        folder = Path(name)
        write(study, folder / "dataset" / DATASET)
        (folder / "system").mkdir()
        quick_start = ["-data", DATASET, "-m", "CNN", "-algo", "FedAvg", "-gr", str(rounds - 1)]
        settings = [
            *("-nc", str(len(study.split.clients))),
            *("-eg", str(evaluate_every)),
            *("-dev", device),
            *("-did", os.environ.get("CUDA_VISIBLE_DEVICES", "0")),
        ]
        command = [sys.executable, str(main), *quick_start, *settings]
        child = subprocess.run(
            command,
            cwd=folder / "system",
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
    seconds, accuracies = TIME.findall(child.stdout), ACCURACY.findall(child.stdout)
    if child.returncode or len(seconds) != rounds or not accuracies:
        raise InputError(f"{main}: no {rounds} rounds: {(child.stderr or child.stdout).strip()[-300:]}")
    return Output([float(each) for each in seconds], float(accuracies[-1]))


def write(study: Study, folder: Path) -> None:
    """Write a study's images, normalised, as PFLlib's files `train/<client>.npz` and `test/<client>.npz`."""
    mean, std = (
        np.asarray(v, np.float32).reshape(-1, 1, 1) for v in (study.spec.input.mean, study.spec.input.std)
    )
    for part in ("train", "test"):
        (folder / part).mkdir(parents=True)
        for number, rows in enumerate(getattr(study.split, part)):
            samples = study.dataset.samples.take(rows)
            content = {"x": (samples.x.astype(np.float32) / 255 - mean) / std, "y": samples.y}
            np.savez(folder / part / f"{number}.npz", data=np.array(content, dtype=object))
