"""Commands of edge-fl as child processes: started, listened to, and ended by their own process id, whatever happens in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from edge_fl.errors import DeadlineError, RunError

GOODBYE_S = 20.0
POLL_S = 0.2
KEPT_LINES = 5


class Child:
    """One `edge-fl` command; `tell` hears every line that it writes to stderr, `printed` is what it wrote to stdout by its end."""

    def __init__(
        self, name: str, arguments: Sequence[str], tell: Callable[[str], None], variables: Mapping[str, str]
    ) -> None:
        self.name = name
        self.last: deque[str] = deque(maxlen=KEPT_LINES)
        self._printed: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "edge_fl", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **variables},
            start_new_session=True,  # Ctrl-C on the terminal reaches the parent alone, which then ends its children in order
        )
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stderr, tell), daemon=True),
            threading.Thread(
                target=self._read, args=(self._process.stdout, self._printed.append), daemon=True
            ),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def code(self) -> int | None:
        """The exit code, None while it runs."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def printed(self) -> str:
        return "\n".join(self._printed)

    def end(self) -> None:
        """Asks it to end, waits, and kills it if it does not."""
        if self.code is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(GOODBYE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(GOODBYE_S)
        self.drain()

    def drain(self) -> None:
        """Waits until all that it wrote has been heard."""
        for reader in self._readers:
            reader.join(GOODBYE_S)
        for stream in (self._process.stdout, self._process.stderr):
            if stream:
                stream.close()

    def _read(self, stream: object, take: Callable[[str], object]) -> None:
        for line in stream:  # type: ignore[attr-defined]
            if text := line.rstrip():
                self.last.append(text)
                take(text)


class Children:
    """The children of one block; those still there at its end are ended, the last started first."""

    def __init__(self, tell: Callable[[str, str], None], variables: Mapping[str, str]) -> None:
        self._tell, self._variables = tell, variables
        self._children: list[Child] = []

    def start(self, name: str, *arguments: str) -> Child:
        """Starts `edge-fl ARGUMENTS`."""
        child = Child(name, arguments, lambda line: self._tell(name, line), self._variables)
        self._children.append(child)
        return child

    def wait(self, child: Child, deadline_s: float) -> str:
        """What the child printed, once it has ended well. Raises RunError when any child ended badly, DeadlineError."""
        until = time.monotonic() + deadline_s
        while child.code is None:
            for other in self._children:
                if other is not child and other.code is not None:
                    raise _ended(other)
            if time.monotonic() > until:
                raise DeadlineError(f"{child.name}: still running after {deadline_s:g} s; ended")
            time.sleep(POLL_S)
        child.drain()
        if child.code:
            raise _ended(child)
        return child.printed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in reversed(self._children):
            child.end()


def _ended(child: Child) -> RunError:
    child.drain()
    said = child.last[-1].removeprefix("edge-fl: ") if child.last else "it said nothing"
    return RunError(f"{child.name} ended with exit code {child.code}: {said}")
