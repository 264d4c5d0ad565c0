"""Child processes that do one heavy thing and end, so that the agent stays small: a request as bytes there, an answer or an error back.

`python -m MODULE` is the far end, which calls `serve`; `Child` is the near end, `Children` as many of them as are asked at a time. What a
child holds (scikit-learn, onnxruntime, images) goes with it, and whatever kills it is an error here and no more.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, LifoQueue
from typing import IO

import msgspec

from edge_fl.errors import ArtefactError, DataError, DeadlineError, RunError

FRAME = struct.Struct("<BQ")  # what follows (an index of FAILURES), then its length in bytes
MAX_FRAME_BYTES = 1024 * 1024 * 1024
FAILURES: tuple[type[Exception] | None, ...] = (None, DataError, RunError, ArtefactError, MemoryError)
AHEAD_S = 60.0
PACKAGE_ROOT = Path(__file__).resolve().parents[1]
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Child:
    """The near end. `what` opens every message about it."""

    def __init__(self, module: str, what: str, arguments: Sequence[str] = ()) -> None:
        self._what = what
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],  # -P: nothing of the working folder is imported
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )

    def request(self, payload: bytes, deadline_s: float) -> bytes:
        """One request there, one answer back.

        Raises DeadlineError, what the far end raised, MemoryError for a child that the system ended, RunError for one that died otherwise.
        """
        process, timer = self._process, threading.Timer(deadline_s, self._process.kill)
        assert process.stdin and process.stdout
        timer.start()
        try:
            _write(process.stdin, 0, payload)
            outcome, answer = _read(process.stdout)
        except (OSError, EOFError) as error:
            code = process.wait()
            if not timer.is_alive():
                raise DeadlineError(
                    f"{self._what}: no answer after {deadline_s:g} s; the child was ended, what served goes on serving"
                ) from error
            if code == -signal.SIGKILL:
                raise MemoryError(
                    f"{self._what}: the system ended the child; out of memory, what served goes on serving"
                ) from error
            raise RunError(
                f"{self._what}: the child ended with code {code}; what served goes on serving"
            ) from error
        finally:
            timer.cancel()
        if failure := FAILURES[outcome]:
            message, why = msgspec.json.decode(answer, type=tuple[str, str])
            raise ArtefactError(message, why) if failure is ArtefactError else failure(message)
        return answer

    def close(self) -> None:
        """Ends the process, at once: it has nothing left to do, and to take Python down in order takes longer than many an answer."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        self._process.wait()


class Children:
    """Children of one module, as many at a time as there are threads that ask. With `keep` they are used again.

    One that is started ahead loads what it needs while its first question is still in the making. `close` ends those that wait.
    """

    def __init__(self, module: str, what: str, arguments: Sequence[str] = (), *, keep: bool = False) -> None:
        self._start, self._keep = partial(Child, module, what, arguments), keep
        self._idle: LifoQueue[Child] = LifoQueue()

    def start(self) -> None:
        """Starts one ahead; unless it is asked within AHEAD_S, it ends."""
        self._idle.put(self._start())
        timer = threading.Timer(AHEAD_S, self.close)
        timer.daemon = True
        timer.start()

    def ask(self, payload: bytes, deadline_s: float) -> bytes:
        """One exchange with a child. Raises as `Child.exchange`."""
        try:
            child = self._idle.get_nowait()
        except Empty:
            child = self._start()
        try:
            answer = child.request(payload, deadline_s)
        except BaseException:
            child.close()
            raise
        if self._keep:
            self._idle.put(child)
        else:
            child.close()
        return answer

    def close(self) -> None:
        """Ends the children that wait."""
        with suppress(Empty):
            while True:
                self._idle.get_nowait().close()


def feature_children() -> Children:
    """Children that turn a device's data into features. It stands here so that one can be started before anything else is loaded."""
    return Children("devices.features.child_main", "data")


def metadata(payload: bytes) -> dict[str, str]:
    """What the header of a safetensors file says beside its tensors."""
    length = int.from_bytes(payload[:8], "little")
    found: dict[str, str] = msgspec.json.decode(payload[8 : 8 + length])["__metadata__"]
    return found


def _environment() -> dict[str, str]:
    """One thread, and the same code as here."""
    path = os.pathsep.join(filter(None, (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONPATH": path}


def serve(what: str, answer: Callable[[bytes], bytes]) -> int:
    """The far end: answers requests from standard input until it ends, gently and without core dumps."""
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            _, request = _read(sys.stdin.buffer)
        except EOFError:
            return 0
        _write(sys.stdout.buffer, *_attempt(what, answer, request))


def _attempt(what: str, answer: Callable[[bytes], bytes], request: bytes) -> tuple[int, bytes]:
    try:
        return 0, answer(request)
    except DataError as error:
        return _failed(DataError, str(error))
    except ArtefactError as error:
        return _failed(ArtefactError, str(error), error.why)
    except MemoryError:
        return _failed(MemoryError, f"{what}: out of memory; nothing came of it")
    except Exception as error:  # a child that dies for it would say less
        return _failed(RunError, f"{what}: {type(error).__name__}: {error}; nothing came of it")


def _failed(kind: type[Exception], message: str, why: str = "") -> tuple[int, bytes]:
    return FAILURES.index(kind), msgspec.json.encode((message, why))


def _write(pipe: IO[bytes], outcome: int, payload: bytes) -> None:
    pipe.write(FRAME.pack(outcome, len(payload)))
    pipe.write(payload)
    pipe.flush()


def _read(pipe: IO[bytes]) -> tuple[int, bytes]:
    outcome, length = FRAME.unpack(_exactly(pipe, FRAME.size))
    if outcome >= len(FAILURES) or length > MAX_FRAME_BYTES:
        raise EOFError(f"a frame of kind {outcome} and {length} bytes")
    return outcome, _exactly(pipe, length)


def _exactly(pipe: IO[bytes], length: int) -> bytes:
    payload = pipe.read(length)
    if len(payload) < length:
        raise EOFError(f"{len(payload)} of {length} bytes")
    return payload
