"""Child processes for heavy computations, so that the agent stays small: a request as bytes in, a response or an error out.

`python -m MODULE` runs the child, which calls `serve`; `Child` is the parent's end, `Children` a pool of them. A child's memory
(scikit-learn, onnxruntime, samples) is freed when it ends, and its death is only an error for the parent, named by its signal. The code
that responds reports its progress with `progress`; a deadline of a request is a time without any.
"""

from __future__ import annotations

import os
import resource
import select
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
from edge_fl import signals, threads
from edge_fl.errors import (
    ArtefactError,
    ChildError,
    DataError,
    DeadlineError,
    KilledError,
    NoLabelsError,
    RunError,
    StoppedError,
    brief,
    encodable,
)
from edge_fl.failures import Failure

T = TypeVar("T")
FRAME = struct.Struct("<BQ")  # an index of ERRORS or PROGRESS, then the length of the payload in bytes
COUNT = struct.Struct("<QQ")  # payload of PROGRESS: done, of
MAX_FRAME_BYTES = 1024 * 1024 * 1024
MAX_WORDS = 4096  # bytes at the end of a child's stderr
ERRORS: tuple[type[Exception] | None, ...] = (
    None,
    DataError,
    RunError,
    ArtefactError,
    MemoryError,
    ChildError,
    NoLabelsError,
)
PROGRESS = len(ERRORS)
MAPPING_FAILED = "failed to map segment"  # in the error of an import that does not fit into the memory
AHEAD_S = 60.0
KILLS = 3  # deaths by a signal in a row from which on they are no accident
END_S = 10.0  # for a child that closed its output, to end
CODE = dict.fromkeys(os.fspath(Path(file).resolve().parents[1]) for file in (str(edge_fl.__file__), __file__))
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
UNAFFECTED = "the served model is unaffected"
Progress = Callable[[int, int], None]
"""Takes how much is done, and of how much, in a unit of the request."""
_parent: Callable[[int, bytes], None] | None = None  # in a child: sends a frame


def ignore(done: int, of: int) -> None:
    """Do nothing with a progress."""


class Child:
    """The parent's end of one child process; `what` begins its error messages, `consequence` ends them."""

    def __init__(
        self, module: str, what: str, arguments: Sequence[str] = (), consequence: str = UNAFFECTED
    ) -> None:
        self._what, self._consequence = what, consequence
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],  # -P: imports nothing from the working folder
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        )
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        self._last_words = b""

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        process = self._process
        assert process.stdin and process.stdout and process.stderr
        return process.stdin, process.stdout, process.stderr

    def request(self, payload: bytes, deadline_s: float, progress: Progress = ignore) -> bytes:
        """Send a request and return the response; pass the child's progress to `progress`.

        Raises DeadlineError after `deadline_s` without any progress, the child's error, MemoryError if the system killed the child,
        KilledError if another signal ended it, ChildError if it ended otherwise.
        """
        try:
            outcome, response = self._exchange(payload, deadline_s, progress)
        except EOFError as error:
            raise self._death() from error
        if kind := ERRORS[outcome]:
            message, why = msgspec.json.decode(response, type=tuple[str, Failure | None])
            raise ArtefactError(message, why) if kind is ArtefactError else kind(message)
        return response

    def _exchange(self, payload: bytes, deadline_s: float, progress: Progress) -> tuple[int, bytes]:
        """Send the request and read frames until the response. Raises EOFError if the child ended, DeadlineError."""
        stdin, stdout, stderr = self._pipes
        unsent = [memoryview(FRAME.pack(0, len(payload))), memoryview(payload)]
        frames, waiting = _Frames(stdout), select.poll()
        waiting.register(stdin, select.POLLOUT)
        for pipe in (stdout, stderr):
            waiting.register(pipe, select.POLLIN)
        while ready := waiting.poll(1000 * deadline_s):
            files = {file for file, _ in ready}
            if stderr.fileno() in files and not self._hear():
                waiting.unregister(stderr)
            if stdin.fileno() in files and not _send(stdin, unsent):
                waiting.unregister(stdin)
            while stdout.fileno() in files and (frame := frames.read()):
                outcome, content = frame
                if outcome != PROGRESS:
                    return frame
                progress(*COUNT.unpack(content))
        self._process.kill()
        raise DeadlineError(
            f"{self._what}: no result and no progress for {deadline_s:g} s", self._consequence
        )

    def _hear(self) -> bool:
        """Keep the end of what the child writes to stderr; return False at its end."""
        words = self._pipes[2].read(MAX_WORDS)
        self._last_words = (self._last_words + (words or b""))[-MAX_WORDS:]
        return words != b""

    def _death(self) -> Exception:
        """The error of a child that ended, or closed its output, without a response."""
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return ChildError(f"{self._what}: the child sent no valid response", self._consequence)
        if code == -signal.SIGKILL:
            return MemoryError(
                f"{self._what}: out of memory, the system killed the child; {self._consequence}"
            )
        message = f"{self._what}: the child {signals.ending(code)}"
        if ended_by := signals.name(code):
            return KilledError(message, ended_by, self._consequence)
        self._hear()
        last = self._last_words.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        if MAPPING_FAILED in last[0] or last[0].startswith("MemoryError"):
            return MemoryError(f"{self._what}: out of memory ({brief(last[0])}); {self._consequence}")
        return ChildError(f"{message}: {brief(last[0])}", self._consequence)

    def kill(self) -> None:
        """Kill the process while a thread may wait for its response."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process: it has no work left, and an orderly exit of Python takes longer than many requests."""
        self._process.kill()
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.close()
        self._process.wait()


class Children:
    """A pool of children of one module, one per requesting thread; with `keep`, children are reused.

    `close` ends the idle ones, `end` all of them.
    """

    def __init__(self, module: str, what: str, arguments: Sequence[str] = (), *, keep: bool = False) -> None:
        self._start, self._keep = partial(Child, module, what, arguments), keep
        self._idle: LifoQueue[Child] = LifoQueue()
        self._working: set[Child] = set()
        self._ended = False

    def start(self) -> None:
        """Start a child ahead of its first request, so that its imports are loaded by then; it ends if unused for AHEAD_S.

        Not while one is at work, as the one that counts the samples: two are too many for the memory of a small board.
        """
        if self._working:
            return
        self._idle.put(self._start())
        threads.later(AHEAD_S, self.close, "edge-fl-children")

    def request(self, payload: bytes, deadline_s: float, progress: Progress = ignore) -> bytes:
        """Send a request to a child and return the response. Raises as `Child.request`, StoppedError once the pool has ended."""
        try:
            child = self._idle.get_nowait()
        except Empty:
            child = self._start()
        self._working.add(child)
        try:
            if self._ended:
                raise StoppedError("stopped", UNAFFECTED)
            response = child.request(payload, deadline_s, progress)
        except BaseException as error:
            child.close()
            if self._ended:
                raise StoppedError("stopped", UNAFFECTED) from error
            raise
        finally:
            self._working.discard(child)
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

    def end(self) -> None:
        """End all children for good: those at work must not keep a stopped agent waiting."""
        self._ended = True
        for child in [*self._working]:
            child.kill()
        self.close()


def again_if_killed(run: Callable[[], T]) -> T:
    """Call `run`, up to KILLS times while a signal ends its child: once is an accident. Raises the last KilledError."""
    for _ in range(KILLS - 1):
        with suppress(KilledError):
            return run()
    return run()


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


def progress(done: int, of: int) -> None:
    """Tell the parent, in any thread of a child, how far the response is, in any unit: its deadline starts anew. No effect elsewhere."""
    if _parent:
        _parent(PROGRESS, COUNT.pack(done, of))


def serve(what: str, respond: Callable[[bytes], bytes]) -> int:
    """Run the child: respond to requests until standard input ends, at low priority and without core dumps."""
    global _parent
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lock, output = threading.Lock(), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints goes to stderr, not between the frames

    def send(outcome: int, payload: bytes) -> None:
        with lock:
            output.write(FRAME.pack(outcome, len(payload)))
            output.write(payload)
            output.flush()

    _parent = send
    while len(header := sys.stdin.buffer.read(FRAME.size)) == FRAME.size:
        _, length = FRAME.unpack(header)
        send(*_attempt(what, respond, sys.stdin.buffer.read(length)))
    return 0


def _attempt(what: str, respond: Callable[[bytes], bytes], request: bytes) -> tuple[int, bytes]:
    """The response, or what the parent raises. Only an error raised on purpose says something about the request."""
    kind: type[Exception]
    try:
        return 0, respond(request)
    except (DataError, RunError) as error:
        kind = next(known for known in (NoLabelsError, DataError, RunError) if isinstance(error, known))
        message, why = error.message, None
    except ArtefactError as error:
        kind, message, why = ArtefactError, error.message, error.why
    except MemoryError as error:
        detail = f" ({error})" if str(error) else ""
        kind, message, why = MemoryError, f"{what}: out of memory{detail}; no result", None
    except Exception as error:  # the parent gets the message, which a dead child could not send
        kind = MemoryError if isinstance(error, ImportError) and MAPPING_FAILED in str(error) else ChildError
        message, why = f"{what}: {type(error).__name__}: {error}; no result", None
    return ERRORS.index(kind), msgspec.json.encode((encodable(message), why))


class _Frames:
    """Reads frames from a pipe that does not block."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe: Any = pipe
        self._begin(None, FRAME.size)

    def _begin(self, outcome: int | None, length: int) -> None:
        self._outcome, self._content, self._filled = outcome, bytearray(length), 0

    def read(self) -> tuple[int, bytes] | None:
        """Read what has arrived; return the next frame if it is complete. Raises EOFError."""
        while True:
            while self._filled < len(self._content):
                count = self._pipe.readinto(memoryview(self._content)[self._filled :])
                if count is None:
                    return None
                if not count:
                    raise EOFError(f"{self._filled} of {len(self._content)} bytes")
                self._filled += count
            outcome, content = self._outcome, self._content
            if outcome is not None:
                self._begin(None, FRAME.size)
                return outcome, bytes(content)
            outcome, length = FRAME.unpack(content)
            if (
                outcome > PROGRESS
                or length > MAX_FRAME_BYTES
                or (outcome == PROGRESS and length != COUNT.size)
            ):
                raise EOFError(f"invalid frame: outcome {outcome}, {length} bytes")
            self._begin(outcome, length)


def _send(pipe: Any, unsent: list[memoryview]) -> bool:
    """Write what the pipe takes now; return whether something is left. A child that takes nothing any more has ended."""
    while unsent:
        try:
            count = pipe.write(unsent[0])
        except OSError:
            return False
        if count is None:
            return True
        unsent[0] = unsent[0][count:]
        if not unsent[0]:
            del unsent[0]
    return False
