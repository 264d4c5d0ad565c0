"""Time measurement: the sides alternate (A B A B), and every report describes the machine during the run."""

import contextlib
import mmap
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from msgspec import Struct

MEGABYTE = 1e6
GEMM_SIZE, GEMM_PRODUCTS = 2048, 4
PAGE = mmap.PAGESIZE
# of /proc/PID/pagemap; a private copy of a file's page is not OF_FILE
ENTRY, PRESENT, OF_FILE = np.dtype("<u8"), np.uint64(1 << 63), np.uint64(1 << 61)
TICKS = os.sysconf("SC_CLK_TCK")


class Times(Struct, frozen=True):
    """Durations of one side, in seconds: wall-clock and processor time."""

    clock: list[float]
    processor: list[float]

    @property
    def least(self) -> float:
        """The shortest wall-clock time."""
        return min(self.clock)

    @property
    def median(self) -> float:
        """The median wall-clock time."""
        return statistics.median(self.clock)


class Machine(Struct, frozen=True):
    """The machine; `gemm` is the peak of all cores in GFLOP/s, measured in the same run."""

    cores: int
    threads: int
    load: tuple[float, float]
    gemm: float
    torch: str
    device: str


def take_turns(
    sides: Mapping[str, Callable[[], object]], turns: int, warm: frozenset[str] = frozenset()
) -> dict[str, Times]:
    """Run each side once, except those in `warm`, then measure all sides alternately, `turns` times."""
    for name, side in sides.items():
        if name not in warm:
            side()
    clock: dict[str, list[float]] = {name: [] for name in sides}
    processor: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, side in sides.items():
            start, used = time.perf_counter(), processor_seconds()
            side()
            clock[name].append(time.perf_counter() - start)
            processor[name].append(processor_seconds() - used)
    return {name: Times(clock[name], processor[name]) for name in sides}


def processor_seconds() -> float:
    """Processor time of this process and its workers."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime + sum(_used(child.pid) for child in multiprocessing.active_children())


def tree_bytes(pid: int) -> int:
    """Memory of a process and all its descendants; shared pages count once (Linux only).

    Unlike the sum of PSS, it does not shrink while an unrelated process maps the same libraries.
    """
    return anonymous_bytes(pid) + file_bytes(pid)


def anonymous_bytes(pid: int) -> int:
    """PSS of the memory without a file, which only processes forked from each other share."""
    return sum(_anonymous(member) for member in family(pid))


def file_bytes(pid: int) -> int:
    """Pages of files, shared memory included, that a process and its descendants use. Takes a tenth of a second."""
    pages: dict[tuple[str, str], list[np.ndarray]] = {}
    for member in family(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended in the meantime
            for file, used in _file_pages(member):
                pages.setdefault(file, []).append(used)
    return PAGE * sum(len(np.unique(np.concatenate(used))) for used in pages.values())


def family(pid: int) -> set[int]:
    """A process and all its descendants (Linux only)."""
    parents = {int(path.parent.name): _parent(path) for path in Path("/proc").glob("[0-9]*/stat")}
    found, size = {pid}, 0
    while len(found) > size:
        size = len(found)
        found |= {child for child, parent in parents.items() if parent in found}
    return found


def machine(before: float, gemm: float, device: str) -> Machine:
    """Describe the machine; `before` is the load average at the start of the run."""
    after = os.getloadavg()[0]
    load = (round(before, 2), round(after, 2))
    cores = len(os.sched_getaffinity(0))
    return Machine(cores, torch.get_num_threads(), load, round(gemm, 1), str(torch.__version__), device)


def products(device: str = "cpu", size: int = GEMM_SIZE) -> Callable[[], None]:
    """A side of float32 products of square matrices on all threads, to measure the GEMM peak."""
    a = torch.rand(size, size, device=device)

    def multiply() -> None:
        for _ in range(GEMM_PRODUCTS):
            a @ a
        settle(device)

    return multiply


def gemm_peak(times: Times, size: int = GEMM_SIZE) -> float:
    """GFLOP/s reached by `products`."""
    return GEMM_PRODUCTS * 2 * size**3 / times.least / 1e9


def settle(device: str) -> None:
    """Wait for an accelerator's queued work."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def _used(pid: int | None) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:  # ended in the meantime
        return 0


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:")), 0)


def _file_pages(pid: int) -> Iterator[tuple[tuple[str, str], np.ndarray]]:
    """(file, numbers of its pages in use) for every mapping of a process."""
    mappings = Path(f"/proc/{pid}/maps").read_text().splitlines()
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap:
        for addresses, _, offset, device, inode, *_ in map(str.split, mappings):
            if inode == "0":
                continue
            start, end = (int(address, 16) // PAGE * ENTRY.itemsize for address in addresses.split("-"))
            entries = np.frombuffer(os.pread(pagemap.fileno(), end - start, start), ENTRY)
            used = np.flatnonzero(entries & (PRESENT | OF_FILE) == PRESENT | OF_FILE)
            yield (device, inode), used + int(offset, 16) // PAGE
