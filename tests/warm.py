"""Run many `edge-fl` commands without importing the libraries for each: a process that has imported them forks a child for every command.

A child runs the same `edge_fl.__main__.main` with its own arguments, folder, network namespace and output, and ends with its exit code.
"""

import atexit
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edge_fl

LIBRARIES = """torch torchvision onnx sklearn.linear_model sklearn.svm sklearn.neural_network matplotlib.figure jinja2 alembic.command
    sqlalchemy tuf.api.metadata nicegui edge_fl.methods edge_fl_server.training.studies""".split()
"""Without onnxruntime: its import starts a thread, which a forked child would lack."""

CLONE_NEWNET = 0x40000000


class WarmStart:
    """The process with the libraries. Use as a context manager; commands that still run at its end go on."""

    def __enter__(self) -> "WarmStart":
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._ended: dict[str, int] = {}
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def start(
        self, arguments: list[str], folder: Path, output: Path, variables: dict[str, str], namespace: str
    ) -> "Command":
        """Start `edge-fl` with these arguments in a folder; `namespace` is the path of a network namespace, "" for this one."""
        request = [arguments, str(folder), str(output), variables, namespace]
        return Command(self, self._request(request))

    def ended(self, pid: int) -> int | None:
        """The exit code of a command that has ended."""
        self._ended |= self._request(None)
        return self._ended.get(str(pid))

    def _request(self, request: Any) -> Any:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@dataclass(frozen=True)
class Command:
    """A running command, with the methods of `subprocess.Popen`."""

    home: WarmStart
    pid: int

    def poll(self) -> int | None:
        return self.home.ended(self.pid)

    def wait(self, timeout: float = 60.0) -> int:
        until_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired("edge-fl", timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve() -> int:
    """Fork a command for each request; return its exit code in the child, 0 in the parent at the end of input."""
    code = 0
    atexit.register(lambda: _leave(code))  # the first one registered is the last one called
    for name in LIBRARIES:
        importlib.import_module(name)
    assert len([*Path("/proc/self/task").iterdir()]) == 1, (
        "a library has started a thread: remove it from LIBRARIES"
    )
    for line in sys.stdin:
        request, answer = json.loads(line), {}
        if request is not None:
            if not (answer := os.fork()):
                code = run(*request)
                return code
        else:
            while (found := _reaped())[0]:
                answer[found[0]] = os.waitstatus_to_exitcode(found[1])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


def run(arguments: list[str], folder: str, output: str, variables: dict[str, str], namespace: str) -> int:
    """Run one command in this process."""
    files = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for source, target in ((files[0], 0), (files[1], 1), (files[1], 2)):
        os.dup2(source, target)
    if namespace:
        with Path(namespace).open() as file:
            assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    importlib.reload(edge_fl)  # it sets variables, as in a new process
    sys.argv = ["edge-fl", *arguments]
    from edge_fl.__main__ import main

    return main()


def _leave(code: int) -> None:
    """End at once: taking the libraries down takes seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _reaped() -> tuple[int, int]:
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


if __name__ == "__main__":
    sys.exit(serve())
