"""Iterate in a thread, so that pictures are decoded while the extractor works on those before them."""

import threading
from collections.abc import Iterator
from queue import Full, Queue
from typing import TypeVar

from edge_fl import threads

T = TypeVar("T")
WAIT_S = 0.1


def ahead(items: Iterator[T], most: int = 1) -> Iterator[T]:
    """Yield `items` in their order, made in one thread that is at most `most` + 1 of them ahead; its exception is raised here."""
    made: Queue[tuple[T] | BaseException | None] = Queue(most)  # an item, an exception, or None at the end
    stopped = threading.Event()

    def put(entry: tuple[T] | BaseException | None) -> None:
        while not stopped.is_set():
            try:
                return made.put(entry, timeout=WAIT_S)
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

    thread = threads.once(run, "edge-fl-ahead")
    thread.start()
    try:
        while (entry := made.get()) is not None:
            if isinstance(entry, BaseException):
                raise entry
            yield entry[0]
    finally:
        stopped.set()
        thread.join()
