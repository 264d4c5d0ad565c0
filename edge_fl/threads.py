"""Background threads that do not end silently: an exception is logged with the thread's name, reported, and the work continues.

All threads and timers of the product are made here (tests/test_layout.py). They are daemons: none keeps the process alive.

    lasting   a loop for the life of its owner; after an exception it starts again, after a pause that doubles up to MAX_PAUSE_S
    once      one piece of work; an exception ends it, but nothing else
    later     one piece of work after a delay, unless cancelled
    guarded   the same for work of a pool whose result is not read
    ahead     an iterator that works in a thread, while the caller uses the items before
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from queue import Full, Queue
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 300.0
PUT_S = 0.1

Report = Callable[[str], None]
"""Takes why a thread failed: the type of the exception and its text."""


def lasting(
    run: Callable[[], object],
    name: str,
    *,
    stopped: threading.Event | None = None,
    report: Report | None = None,
) -> threading.Thread:
    """Return a thread, not started, that calls `run` until it returns without an exception, or until `stopped` is set.

    `run` must be able to start again where an exception ended it. A run that lasted for MAX_PAUSE_S resets the pause.
    """

    def keep_running() -> None:
        ended, pause_s = stopped or threading.Event(), FIRST_PAUSE_S
        while not ended.is_set():
            started_s = time.monotonic()
            if guarded(run, name, report)():
                return
            if time.monotonic() - started_s >= MAX_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            log.warning("thread %s: starting again in %g s", name, pause_s)
            ended.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    return threading.Thread(target=keep_running, name=name, daemon=True)


def once(run: Callable[[], object], name: str, *, report: Report | None = None) -> threading.Thread:
    """Return a thread, not started, that calls `run` once."""
    return threading.Thread(target=guarded(run, name, report), name=name, daemon=True)


def later(delay_s: float, run: Callable[[], object], name: str) -> threading.Timer:
    """Start a timer that calls `run` after a delay, unless it is cancelled."""
    timer = threading.Timer(delay_s, guarded(run, name))
    timer.name, timer.daemon = name, True
    timer.start()
    return timer


def guarded(run: Callable[[], object], name: str, report: Report | None = None) -> Callable[[], bool]:
    """Return a function that calls `run`, logs and reports an exception, and returns whether there was none."""

    def call() -> bool:
        try:
            run()
        except Exception as error:
            log.exception("thread %s: unexpected error", name)
            if report:
                try:
                    report(f"{type(error).__name__}: {error}")
                except Exception:
                    log.exception("thread %s: its failure could not be reported", name)
            return False
        return True

    return call


def ahead(items: Iterator[T], most: int = 1) -> Iterator[T]:
    """Yield `items` in their order, made in one thread that is at most `most` + 1 of them ahead; its exception is raised here."""
    made: Queue[tuple[T] | BaseException | None] = Queue(most)  # an item, an exception, or None at the end
    stopped = threading.Event()

    def put(entry: tuple[T] | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                return made.put(entry, timeout=PUT_S)
            except Full:
                continue

    def run() -> None:
        try:
            for item in items:
                put((item,))
                if stopped.is_set():
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = once(run, "edge-fl-ahead")
    thread.start()
    try:
        while (entry := made.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            yield entry[0]
    finally:
        stopped.set()
        thread.join()
