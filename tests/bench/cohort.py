"""A5: does memory grow with the cohort? One round over so many clients, each in a process of its own, whose whole tree is watched."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from tests.bench import workloads
from tests.bench.figures import Figure
from tests.bench.measure import MEGABYTE, tree_bytes
from tests.bench.training import Round

SIZES = (100, 1000, 10_000)
EVERY_S = 0.25  # how often memory is looked at
DEADLINE_S = 1800.0


class MemoryUse(msgspec.Struct, frozen=True):
    """Seconds of the round, and bytes: of all images, and the most that all processes together held."""

    seconds: float
    data: int
    peak: int = 0

    @property
    def above(self) -> float:
        """Megabytes beyond the images themselves."""
        return (self.peak - self.data) / MEGABYTE


def cohorts(turns: int, sizes: Sequence[int] = SIZES) -> Figure:
    """A5: a round of FedPer, whose personal heads are files, over cohorts of work A's network with six images per client."""
    found = {size: watched(size) for size in sizes}
    notes: dict[str, float | str] = {}
    for size, use in found.items():
        notes |= {f"MB at {size}": round(use.above), f"s at {size}": round(use.seconds, 1)}
    largest = max(sizes)
    what = f"memory of a round over {largest:,} clients of work A's network, images apart"
    return Figure("A5", what, 2.0, " GB", at_most=True, value=found[largest].above / 1000, notes=notes)


def watched(clients: int) -> MemoryUse:
    """The round in a new process, and the most memory that it and its workers held (what they share counts once)."""
    with TemporaryDirectory(prefix="edge-fl-bench-") as folder:
        report, peak = Path(folder) / "use.json", 0
        command = [sys.executable, "-m", "tests.bench.cohort", str(clients), str(report)]
        with subprocess.Popen(command) as process:
            deadline = time.monotonic() + DEADLINE_S
            while process.poll() is None and time.monotonic() < deadline:
                peak = max(peak, tree_bytes(process.pid))
                time.sleep(EVERY_S)
            process.kill()
        return msgspec.structs.replace(msgspec.json.decode(report.read_bytes(), type=MemoryUse), peak=peak)


def main(clients: int, report: Path) -> None:
    """What the new process does."""
    study = workloads.many(clients, "fedper")
    ready = Round(study, "pool")
    began = time.monotonic()
    ready()
    use = MemoryUse(time.monotonic() - began, study.dataset.samples.x.nbytes)
    report.write_bytes(msgspec.json.encode(use))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
