"""Signals: how they ended a process, in words, and how Ctrl-C and SIGTERM end a command.

That is by KeyboardInterrupt, of which `Terminated` stands for SIGTERM, but never in the middle of an import, and for certain. torch and
other packages run Python code inside C++ functions while they are imported. An exception there ends the process (SIGABRT, or SIGSEGV). So
the exception of a signal that comes during an import is raised on the line after it. Other functions in C, such as those that convert
settings, may swallow an exception of Python code that they call. So it is raised again where edge-fl's own code goes on without it.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import NamedTuple

REPEATED_S = 1.0
OURS = "edge_fl"
IMPORTING = "<frozen importlib._bootstrap>"
"""File name of the first frame of every import."""

_terminated_s = -REPEATED_S


class Terminated(KeyboardInterrupt):
    """SIGTERM: something ends the command as planned, such as systemd, a script or a parent."""


class Stop(NamedTuple):
    """How a signal stopped a command, in words, and the exit code of one that was not done."""

    words: str
    code: int


STOPS = {
    signal.SIGINT: Stop("stopped by Ctrl-C", 130),
    signal.SIGTERM: Stop("stopped by SIGTERM", 143),
}
"""The signals that stop a command; exit codes as those of a shell, 128 and the number of the signal."""


def stop_of(error: KeyboardInterrupt) -> Stop:
    """Which signal an exception stands for."""
    return STOPS[signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT]


@contextmanager
def serving(show: Callable[[str], object]) -> Iterator[None]:
    """A block that serves until a signal stops it, which is its planned end; `show` receives how, in words.

    A shell sets SIGINT to ignored for what a script starts with "&"; here it stops the block also then, as it stops brokers and agents.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_ignored := is_main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    except KeyboardInterrupt as error:
        show(stop_of(error).words)
    finally:
        if is_ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def name(code: int) -> str:
    """The name of the signal in a return code of `subprocess`, such as SIGSEGV for -11; "" if no signal ended the process."""
    if code >= 0:
        return ""
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal
        return f"signal {-code}"


def ending(code: int) -> str:
    """How a process ended: "ended with exit code 1", or "was ended by SIGILL (illegal instruction)"."""
    if not (ended_by := name(code)):
        return f"ended with exit code {code}"
    meaning = signal.strsignal(-code)
    return f"was ended by {ended_by}" + (f" ({meaning.lower()})" if meaning else "")


@contextmanager
def interrupting() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block for both signals. Only in the main thread; a SIGINT that is ignored stays so."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, _interrupt)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            before[signal.SIGINT] = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handle a signal. SIGTERM comes twice from 'timeout': the second one would disturb the clean-up."""
    global _terminated_s
    importing = _importing(frame)
    if number == signal.SIGTERM and not importing:
        now_s = time.monotonic()
        repeated, _terminated_s = now_s - _terminated_s < REPEATED_S, now_s
        if repeated:
            return
    error = Terminated if number == signal.SIGTERM else KeyboardInterrupt
    if (waiting := importing or _ours(frame)) and sys.gettrace() in (None, _pass):
        waiting.f_trace = partial(_raise if importing else _expect, error)
        sys.settrace(_pass)  # without it no frame is traced
        if importing:
            return
    raise error


def _importing(frame: FrameType | None) -> FrameType | None:
    """The frame that waits for the outermost of the imports that are running; None if there is none."""
    found = None
    while frame:
        if frame.f_code.co_filename == IMPORTING:
            found = frame.f_back
        frame = frame.f_back
    return found


def _ours(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of edge-fl's own code."""
    while frame and not str(frame.f_globals.get("__name__")).startswith(OURS):
        frame = frame.f_back
    return frame


def _pass(frame: FrameType, event: str, argument: object) -> None:
    """Trace nothing."""


def _raise(error: type[KeyboardInterrupt], frame: FrameType, event: str, argument: object) -> None:
    """Raise `error` on the frame's next line, or where it returns or gets an exception."""
    sys.settrace(None)
    frame.f_trace = None
    raise error


def _expect(error: type[KeyboardInterrupt], frame: FrameType, event: str, argument: object) -> None:
    """The same, unless an exception has reached the frame first."""
    if event != "exception":
        _raise(error, frame, event, argument)
    sys.settrace(None)
    frame.f_trace = None
