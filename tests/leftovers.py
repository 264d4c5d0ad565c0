"""What programs leave behind: processes, files in shared memory with POSIX semaphores, temporary files.

The processes of a program are found by a variable in their environment, which they inherit even into sessions of their own.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHARED_MEMORY = Path("/dev/shm")
VARIABLE = "EDGE_FL_TEST_COMMAND"
START_S, END_S = 90.0, 60.0
LIBRARIES = ("torchinductor_",)  # kept by torch


class Traces:
    """Processes and files of all programs started with `variables`; each has a folder for temporary files of its own."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.temporary = Path(
            tempfile.mkdtemp(prefix="efl-")
        )  # short: a socket's path has at most 107 characters
        paths = {"TMPDIR": str(self.temporary), "PYTHONPATH": str(ROOT)}
        self.variables = {VARIABLE: self.mark, "OMP_NUM_THREADS": "1", **paths}

    def pids(self) -> list[int]:
        """All processes that run."""
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if self._owns(path)]

    def named(self, text: str) -> list[int]:
        """The running processes with this text in their command line."""
        return [pid for pid in self.pids() if text in command_of(pid)]

    def shared(self) -> set[Path]:
        """The files in shared memory that the processes map or have open, semaphores too, and the folders of these files."""
        files = set()
        for pid in self.pids():
            with suppress(OSError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                files |= {Path(line.split()[5]) for line in lines if "/dev/shm/" in line}
            for link in Path(f"/proc/{pid}/fd").glob("*"):
                with suppress(OSError):
                    files.add(link.readlink())
        inside = [path for path in files if path.is_relative_to(SHARED_MEMORY) and len(path.parts) > 3]
        return {SHARED_MEMORY / path.parts[3] for path in inside}

    def folders(self) -> list[Path]:
        """The temporary files and folders."""
        return [path for path in self.temporary.iterdir() if not path.name.startswith(LIBRARIES)]

    def left(self, shared: set[Path]) -> list[str]:
        """All processes, temporary files, and those of the files `shared` that exist."""
        files = [path for path in [*shared, *self.folders()] if path.exists()]
        return [*map(command_of, self.pids()), *map(str, files)]

    def require_none(self, shared: set[Path], log: Callable[[], str] = str, end_s: float = END_S) -> None:
        """Wait until nothing is left."""
        until = time.monotonic() + end_s
        while left := self.left(shared):
            assert time.monotonic() < until, "\n".join([*left, log()])
            time.sleep(0.05)

    def kill(self) -> None:
        for pid in self.pids():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _owns(self, process: Path) -> bool:
        with suppress(OSError):
            return f"{VARIABLE}={self.mark}".encode() in (process / "environ").read_bytes()
        return False


class Command(Traces):
    """A running program with a log of its output."""

    def __init__(self, command: list[str], folder: Path, input: Path | None = None) -> None:
        super().__init__()
        self.log = folder / f"{self.mark}.log"
        with self.log.open("w") as log, (input or Path(os.devnull)).open() as source:
            self.process = subprocess.Popen(
                command,
                stdin=source,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=os.environ | self.variables,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        self.process.poll()
        return super().pids()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + START_S
        while not condition():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < until, self.output()
            time.sleep(0.05)

    def processor_s(self) -> float:
        """Processor time of the first process: a point of its start that does not depend on the machine's load."""
        return processor_s(self.process.pid)

    def output(self) -> str:
        return self.log.read_text()

    def says(self, text: str) -> bool:
        return text in self.output()

    def require_clean_end(self, shared: set[Path], end_s: float = END_S) -> None:
        self.require_none(shared, self.output, end_s)


@contextmanager
def running(command: list[str], folder: Path, input: Path | None = None) -> Iterator[Command]:
    """Run a program in a folder; whatever is left at the end of the block is killed."""
    started = Command(command, folder, input)
    try:
        yield started
    finally:
        started.kill()
        started.process.wait()


def edge_fl(*arguments: str) -> list[str]:
    """The command line of an `edge-fl` command."""
    return [sys.executable, "-m", "edge_fl", *arguments]


def command_of(pid: int) -> str:
    with suppress(OSError):
        return f"{pid} " + Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    return str(pid)


def processor_s(pid: int) -> float:
    """Processor time of all threads of a process, without its children's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
