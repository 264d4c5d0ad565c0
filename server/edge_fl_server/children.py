"""Commands of edge-fl as child processes: start them, read their output, and always end them."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import IO, Self

from edge_fl import signals, threads
from edge_fl.cli import PARENT
from edge_fl.errors import DeadlineError, RunError

GOODBYE_S = 20.0
POLL_S = 0.2
LOOPBACK = "127.0.0.1"


class CommandProcess:
    """A running `edge-fl` command. `on_line` receives every line of its stderr; `printed` is its stdout so far."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        on_line: Callable[[str], None],
        variables: Mapping[str, str],
    ) -> None:
        self.name = name
        self.last_line = ""
        self._printed: list[str] = []
        self._drained = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "edge_fl", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **variables, PARENT: str(os.getpid())},  # also ends if this process is killed
            start_new_session=True,  # Ctrl-C reaches only the parent, which then ends its children in order
        )
        assert self._process.stderr and self._process.stdout
        outputs = ((self._process.stderr, on_line), (self._process.stdout, self._printed.append))
        self._readers = [
            threads.lasting(
                partial(self._read, stream, take), f"edge-fl-output-{name}", stopped=self._drained
            )
            for stream, take in outputs
        ]
        for reader in self._readers:
            reader.start()

    @property
    def code(self) -> int | None:
        """The exit code; None while the command runs."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def printed(self) -> str:
        return "\n".join(self._printed)

    def end(self) -> None:
        """Terminate the command, and kill it if that takes too long."""
        if self.code is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(GOODBYE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(GOODBYE_S)
        self.drain()

    def drain(self) -> None:
        """Wait until all output has been read."""
        for reader in self._readers:
            reader.join(GOODBYE_S)
        self._drained.set()
        for stream in (self._process.stdout, self._process.stderr):
            if stream:
                stream.close()

    def failure(self) -> RunError:
        """The error of a command that ended unexpectedly, with its last line of output."""
        self.drain()
        reason = self.last_line.removeprefix("edge-fl: ") or "no output"
        return RunError(f"{self.name} {signals.ending(self.code or 0)}: {reason}")

    def _read(self, stream: IO[str], on_line: Callable[[str], object]) -> None:
        for line in stream:
            if text := line.rstrip():
                self.last_line = text
                on_line(text)


class CommandProcesses:
    """The child processes of one block; at its end the running ones are ended, the last started first."""

    def __init__(self, on_line: Callable[[str, str], None], variables: Mapping[str, str]) -> None:
        self._on_line, self._variables = on_line, variables
        self._children: list[CommandProcess] = []

    def start(self, name: str, *arguments: str) -> CommandProcess:
        """Start `edge-fl ARGUMENTS`."""
        child = CommandProcess(name, arguments, partial(self._on_line, name), self._variables)
        self._children.append(child)
        return child

    def wait_listening(self, child: CommandProcess, port: int, deadline_s: float) -> None:
        """Wait until a child accepts connections on a port of loopback. Raises RunError if it ends first; DeadlineError."""
        until = time.monotonic() + deadline_s
        while not _is_open(port):
            if child.code is not None:
                raise child.failure()
            if time.monotonic() > until:
                raise DeadlineError(
                    f"{child.name}: port {port} accepts no connection after {deadline_s:g} s; ended"
                )
            time.sleep(POLL_S)

    def wait(self, child: CommandProcess, deadline_s: float, codes: Collection[int] = (0,)) -> str:
        """Wait until the child ends with one of these exit codes, and return its stdout.

        Raises RunError if another child ends before it, or it ends with another code; DeadlineError.
        """
        until = time.monotonic() + deadline_s
        while child.code is None:
            for other in self._children:
                if other is not child and other.code is not None:
                    raise other.failure()
            if time.monotonic() > until:
                raise DeadlineError(f"{child.name}: still running after {deadline_s:g} s; ended")
            time.sleep(POLL_S)
        if child.code not in codes:
            raise child.failure()
        self.end(child)
        return child.printed

    def end(self, child: CommandProcess) -> None:
        """End a child, which the others may outlive."""
        child.end()
        self._children.remove(child)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in reversed(self._children):
            child.end()


def _is_open(port: int) -> bool:
    """Whether a program accepts connections on a port of loopback."""
    with socket.socket() as probe:
        probe.settimeout(POLL_S)
        return probe.connect_ex((LOOPBACK, port)) == 0
