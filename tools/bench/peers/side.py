"""The parent's end: a side as a child process that is timed round by round, with its memory."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tools.bench.measure import anonymous_bytes, family, file_bytes

ROOT = Path(__file__).parents[3]
ENVIRONMENTS = ROOT / ".venvs"
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
ROUND_S, END_S = 600.0, 20.0  # deadlines
SAMPLE_S = 0.5  # between two measurements of memory
LOG_LINES = 3


class SideError(Exception):
    """A side could not be started or ended early."""


@dataclass(frozen=True)
class Command:
    """How to start a side: its kind in `child.MODULES`, the Python of its environment, arguments, and threads (0: as by default)."""

    kind: str
    python: Path = Path(sys.executable)
    arguments: tuple[str, ...] = ()
    threads: int = 0

    @classmethod
    def separate(cls, kind: str) -> "Command":
        """The command of a simulator with an environment of its own."""
        return cls(kind, ENVIRONMENTS / kind / "bin" / "python")


class Side:
    """A running side. `about`: its latest description of itself; `first_s`: seconds from its start to the end of its first round; `peak`:
    the largest memory of its processes in `watched` rounds, in bytes (`measure.tree_bytes`).
    """

    def __init__(self, command: Command, job: Path, log: Path) -> None:
        self.about: dict[str, Any] = {}
        self.peak = 0
        self.first_s = 0.0
        self._log = log
        if not command.python.exists():
            raise SideError(f"not installed: no {command.python.relative_to(ROOT)}")
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        environment |= QUIET | ({"OMP_NUM_THREADS": f"{command.threads}"} if command.threads else {})
        module = ("-m", "tools.bench.peers.child", command.kind, str(job), *command.arguments)
        self._started = time.perf_counter()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [command.python, *module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> "Side":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def round(self) -> float:
        """Run a round; returns its seconds of wall time. Raises SideError."""
        start = time.perf_counter()
        self.about = self._ask("round")
        self.first_s = self.first_s or time.perf_counter() - self._started
        return time.perf_counter() - start

    def watched(self) -> float:
        """Run a round and sample the memory of all processes of the side; returns its seconds of wall time."""
        with self._sampled():
            return self.round()

    def weights(self, path: Path) -> Mapping[str, np.ndarray]:
        """The weights after the last round, by name (`job.numbered`)."""
        self._ask(f"weights {path}")
        with np.load(path) as arrays:
            return dict(arrays)

    def end(self) -> None:
        """Close the side's input; end those of its processes that remain."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with contextlib.ExitStack() as stack:
            members = [_handle(member, stack) for member in family(self._process.pid)]
            with contextlib.suppress(BrokenPipeError):
                stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            for member in filter(None, members):
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(member, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # children of a side that ended early
        self._process.wait()
        stdout.close()

    def _ask(self, request: str) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(f"{request}\n".encode())
            stdin.flush()
        except BrokenPipeError:
            raise SideError(self._last_words()) from None
        if not select.select([stdout], [], [], ROUND_S)[0]:
            raise SideError(f"no answer in {ROUND_S:.0f} s")
        line = stdout.readline()
        if not line:
            self._process.wait(END_S)
            raise SideError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return " / ".join(line.strip() for line in lines[-LOG_LINES:]) or "ended without a message"

    @contextlib.contextmanager
    def _sampled(self) -> Iterator[None]:
        done, samples = threading.Event(), [0]

        def sample() -> None:
            while not done.wait(SAMPLE_S):
                samples.append(anonymous_bytes(self._process.pid))

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            samples.append(anonymous_bytes(self._process.pid))
            self.peak = max(self.peak, max(samples) + file_bytes(self._process.pid))


def _handle(pid: int, stack: contextlib.ExitStack) -> int | None:
    """A descriptor of a process, which stays valid if its id is used again."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    stack.callback(os.close, descriptor)
    return descriptor
