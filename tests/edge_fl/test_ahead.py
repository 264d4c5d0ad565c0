"""Pictures are decoded ahead of the extractor, in one thread and by a bounded number."""

import threading
import time
from collections.abc import Iterator

import pytest

from edge_fl.threads import ahead
from tests.devices.scripted import eventually


def counted(made: list[int], most: int = 100) -> Iterator[int]:
    for number in range(most):
        made.append(number)
        yield number


def settle(made: list[int]) -> int:
    """Wait until no more items are made."""
    before = -1
    while before != len(made):
        before = len(made)
        time.sleep(0.05)
    return before


def test_all_items_come_in_their_order() -> None:
    assert list(ahead(counted([]))) == list(range(100))
    assert list(ahead(iter(()))) == []


def test_the_thread_is_ahead_by_a_bounded_number() -> None:
    made: list[int] = []
    items = ahead(counted(made))
    assert next(items) == 0
    eventually(lambda: len(made) >= 3)
    assert settle(made) == 3  # the one taken, one waiting, one finished
    items.close()  # type: ignore[attr-defined]


def test_its_error_is_raised_after_the_items_before_it() -> None:
    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    items = ahead(failing())
    assert next(items) == 1
    with pytest.raises(ValueError, match="broken"):
        next(items)


def test_a_reader_that_stops_ends_the_thread() -> None:
    made: list[int] = []
    for number in ahead(counted(made)):
        if number == 5:
            break
    assert settle(made) < 10 and "ahead" not in {thread.name for thread in threading.enumerate()}
