"""Child processes for heavy computations, so that the agent stays small: a request as bytes in, a response or an error out.

`python -m MODULE` runs the child, which calls `serve`; `Child` is the parent's end, `Children` a pool of them. A child's memory
(scikit-learn, onnxruntime, images) is freed when it ends, and its death is only an error for the parent.
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
from typing import IO, Any, TypeVar

import msgspec

import edge_fl
from edge_fl.errors import ArtefactError, DataError, DeadlineError, RunError

T = TypeVar("T")
FRAME = struct.Struct("<BQ")  # an index of ERRORS, then the length of the payload in bytes
MAX_FRAME_BYTES = 1024 * 1024 * 1024
ERRORS: tuple[type[Exception] | None, ...] = (None, DataError, RunError, ArtefactError, MemoryError)
MAPPING_FAILED = "failed to map segment"  # in the error of an import that does not fit into the memory
AHEAD_S = 60.0
CODE = dict.fromkeys(str(Path(file).resolve().parents[1]) for file in (str(edge_fl.__file__), __file__))
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
UNAFFECTED = "the served model is unaffected"


class Child:
    """The parent's end of one child process; `what` begins its error messages."""

    def __init__(self, module: str, what: str, arguments: Sequence[str] = ()) -> None:
        self._what = what
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],  # -P: imports nothing from the working folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
        )

    def request(self, payload: bytes, deadline_s: float) -> bytes:
        """Send a request and return the response.

        Raises DeadlineError, the child's error, MemoryError if the system killed the child, RunError if it died otherwise.
        """
        process, expired = self._process, threading.Event()

        def expire() -> None:
            expired.set()  # before the child ends: its end is all that this thread waits for
            process.kill()

        timer = threading.Timer(deadline_s, expire)
        assert process.stdin and process.stdout
        timer.start()
        try:
            _write(process.stdin, 0, payload)
            outcome, response = _read(process.stdout)
        except (OSError, EOFError) as error:
            code = process.wait()
            if expired.is_set():
                raise DeadlineError(f"{self._what}: no result after {deadline_s:g} s", UNAFFECTED) from error
            if code == -signal.SIGKILL:
                raise MemoryError(
                    f"{self._what}: out of memory, the system killed the child; {UNAFFECTED}"
                ) from error
            raise RunError(f"{self._what}: the child exited with code {code}", UNAFFECTED) from error
        finally:
            timer.cancel()
        if kind := ERRORS[outcome]:
            message, why = msgspec.json.decode(response, type=tuple[str, str])
            raise ArtefactError(message, why) if kind is ArtefactError else kind(message)
        return response

    def close(self) -> None:
        """Kill the process: it has no work left, and an orderly exit of Python takes longer than many requests."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        self._process.wait()


class Children:
    """A pool of children of one module, one per requesting thread; with `keep`, children are reused. `close` ends the idle ones."""

    def __init__(self, module: str, what: str, arguments: Sequence[str] = (), *, keep: bool = False) -> None:
        self._start, self._keep = partial(Child, module, what, arguments), keep
        self._idle: LifoQueue[Child] = LifoQueue()

    def start(self) -> None:
        """Start a child ahead of its first request, so that its imports are loaded by then; it ends if unused for AHEAD_S."""
        self._idle.put(self._start())
        timer = threading.Timer(AHEAD_S, self.close)
        timer.daemon = True
        timer.start()

    def request(self, payload: bytes, deadline_s: float) -> bytes:
        """Send a request to a child and return the response. Raises as `Child.request`."""
        try:
            child = self._idle.get_nowait()
        except Empty:
            child = self._start()
        try:
            response = child.request(payload, deadline_s)
        except BaseException:
            child.close()
            raise
        if self._keep:
            self._idle.put(child)
        else:
            child.close()
        return response

    def close(self) -> None:
        """End the idle children."""
        with suppress(Empty):
            while True:
                self._idle.get_nowait().close()


def feature_children() -> Children:
    """Return a pool of children that compute features. Defined here so that one can start before anything heavy is imported."""
    return Children("edge_fl_devices.features.child_main", "data")


def encode(message: object) -> bytes:
    """Encode a struct or dataclass, whose arrays become (dtype, shape, bytes)."""
    return msgspec.msgpack.encode(
        message, enc_hook=lambda array: (array.dtype.str, array.shape, array.tobytes())
    )


def decode(payload: bytes, kind: type[T]) -> T:
    """Decode what `encode` returned; arrays are read-only."""
    return msgspec.msgpack.decode(payload, type=kind, dec_hook=_array)


def _array(kind: type, encoded: tuple[str, list[int], bytes]) -> Any:
    import numpy as np  # here, so that a child can start before NumPy is imported

    dtype, shape, content = encoded
    return np.frombuffer(content, dtype).reshape(shape)


def environment() -> dict[str, str]:
    """Variables of a child: one thread, and the same code as the parent."""
    path = os.pathsep.join(filter(None, (*CODE, os.environ.get("PYTHONPATH"))))
    return {**os.environ, **dict.fromkeys(THREADS, "1"), "PYTHONPATH": path}


def serve(what: str, respond: Callable[[bytes], bytes]) -> int:
    """Run the child: respond to requests until standard input ends, at low priority and without core dumps."""
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            _, request = _read(sys.stdin.buffer)
        except EOFError:
            return 0
        _write(sys.stdout.buffer, *_attempt(what, respond, request))


def _attempt(what: str, respond: Callable[[bytes], bytes], request: bytes) -> tuple[int, bytes]:
    kind: type[Exception]
    try:
        return 0, respond(request)
    except DataError as error:
        kind, message, why = DataError, error.message, ""
    except ArtefactError as error:
        kind, message, why = ArtefactError, error.message, error.why
    except MemoryError as error:
        detail = f" ({error})" if str(error) else ""
        kind, message, why = MemoryError, f"{what}: out of memory{detail}; no result", ""
    except Exception as error:  # the parent gets the message, which a dead child could not send
        kind = MemoryError if isinstance(error, ImportError) and MAPPING_FAILED in str(error) else RunError
        message, why = f"{what}: {type(error).__name__}: {error}; no result", ""
    return ERRORS.index(kind), msgspec.json.encode((message, why))


def _write(pipe: IO[bytes], outcome: int, payload: bytes) -> None:
    pipe.write(FRAME.pack(outcome, len(payload)))
    pipe.write(payload)
    pipe.flush()


def _read(pipe: IO[bytes]) -> tuple[int, bytes]:
    outcome, length = FRAME.unpack(_read_exactly(pipe, FRAME.size))
    if outcome >= len(ERRORS) or length > MAX_FRAME_BYTES:
        raise EOFError(f"invalid frame: outcome {outcome}, {length} bytes")
    return outcome, _read_exactly(pipe, length)


def _read_exactly(pipe: IO[bytes], length: int) -> bytes:
    payload = pipe.read(length)
    if len(payload) < length:
        raise EOFError(f"{len(payload)} of {length} bytes")
    return payload
