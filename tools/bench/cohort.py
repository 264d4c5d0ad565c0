"""A5: memory of a round as a function of the cohort's size, each size in its own process."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from tools.bench import workloads
from tools.bench.figures import Figure
from tools.bench.measure import MEGABYTE, tree_bytes
from tools.bench.training import Round

SIZES = (100, 1000, 10_000)
SAMPLE_S = 0.25  # between two measurements of memory
DEADLINE_S = 1800.0


class MemoryUse(msgspec.Struct, frozen=True):
    """Duration of the round, bytes of all images, and peak memory of all processes."""

    seconds: float
    data: int
    peak: int = 0

    @property
    def above(self) -> float:
        """Megabytes in addition to the images."""
        return (self.peak - self.data) / MEGABYTE


def cohorts(turns: int, sizes: Sequence[int] = SIZES) -> Figure:
    """A5: a round of FedPer (personal heads in files) over cohorts with work A's network and six images per client."""
    uses = {size: measured(size) for size in sizes}
    notes: dict[str, float | str] = {}
    for size, use in uses.items():
        notes |= {f"MB at {size}": round(use.above), f"s at {size}": round(use.seconds, 1)}
    largest = max(sizes)
    what = f"memory of a round over {largest:,} clients of work A's network, without the images"
    return Figure("A5", what, 2.0, " GB", at_most=True, value=uses[largest].above / 1000, notes=notes)


def measured(clients: int) -> MemoryUse:
    """Run the round in a new process; peak memory of the process and its workers (shared memory counts once)."""
    with TemporaryDirectory(prefix="edge-fl-bench-") as folder:
        report, peak = Path(folder) / "use.json", 0
        command = [sys.executable, "-m", "tools.bench.cohort", str(clients), str(report)]
        with subprocess.Popen(command) as process:
            deadline = time.monotonic() + DEADLINE_S
            while process.poll() is None and time.monotonic() < deadline:
                peak = max(peak, tree_bytes(process.pid))
                time.sleep(SAMPLE_S)
            process.kill()
        return msgspec.structs.replace(msgspec.json.decode(report.read_bytes(), type=MemoryUse), peak=peak)


def main(clients: int, report: Path) -> None:
    """Run the round in this process and write its memory use."""
    study = workloads.many(clients, "fedper")
    one_round = Round(study, "pool")
    start = time.monotonic()
    one_round()
    use = MemoryUse(time.monotonic() - start, study.dataset.samples.x.nbytes)
    report.write_bytes(msgspec.json.encode(use))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
