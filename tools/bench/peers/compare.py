"""Compares the sides of a case: their weights after round 1, then their times in turns."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np

from tools.bench.peers import workload
from tools.bench.peers.cases import CASES, Case
from tools.bench.peers.report import OURS, Compared, Result
from tools.bench.peers.side import Command, Side, SideError

THREADS = (1, 2)  # PFLlib's settings; the table shows the faster one
NAMES = {"pfllib": "PFLlib", "plain": "plain loop", "flower": "Flower"}


def commands(case: Case, pfllib: Path | None) -> list[Command]:
    """The sides of a case; PFLlib with each number of threads."""
    theirs = [Command("pfllib", arguments=(str(pfllib),), threads=threads) for threads in THREADS]
    others = [Command(kind) if kind == "plain" else Command.separate(kind) for kind in case.others]
    return [Command(OURS), *(theirs if pfllib else ()), *others]


def compared(name: str, sides: list[Command], turns: int, quick: bool = False) -> Compared:
    """Start the sides one after the other for two rounds each, then measure `turns` rounds of all alternately.

    edge-fl comes first in `sides`. A side that fails is reported with its error; the others go on.
    """
    case = CASES[name]
    with TemporaryDirectory(prefix="edge-fl-peers-") as temporary, ExitStack() as stack:
        job = Path(temporary)
        steps = workload.write(job, name, quick)
        found: list[Result] = []
        running: dict[int, Side] = {}
        reference: Mapping[str, np.ndarray] = {}
        for number, command in enumerate(sides):
            result = Result(NAMES.get(command.kind, command.kind))
            try:
                side = stack.enter_context(Side(command, job, job / f"{number}.log"))
                side.watched()
                weights = side.weights(job / "weights.npz")
                side.watched()
            except SideError as error:
                found.append(msgspec.structs.replace(result, error=str(error)))
                continue
            reference = reference or weights
            running[number] = side
            apart = None if command.kind == OURS else difference(reference, weights)
            found.append(
                msgspec.structs.replace(
                    result, about=side.about, first_s=side.first_s, peak=side.peak, difference=apart
                )
            )
        for _ in range(turns):
            for number, side in list(running.items()):
                try:
                    found[number].seconds.append(side.round())
                except SideError as error:
                    found[number] = msgspec.structs.replace(found[number], error=str(error))
                    del running[number]
    return Compared(case.title, case.size(quick).clients, steps, found, case.tolerance)


def difference(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> float:
    """The largest difference between the weights of two sides; infinite if they have not the same ones."""
    if ours.keys() != theirs.keys() or any(ours[name].shape != theirs[name].shape for name in ours):
        return float("inf")
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours)
