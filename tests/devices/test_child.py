"""Children answer and are gone; one that was started ahead is the one that is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from devices.child import Children
from edge_fl.errors import RunError
from tests.devices.scripted import eventually


@pytest.fixture(params=[False, True], ids=["once", "kept"])
def children(request: pytest.FixtureRequest) -> Iterator[Children]:
    with closing(Children("tests.devices.who", "who", keep=request.param)) as children:
        yield children


def ask(children: Children) -> int:
    number, said = children.request(b"well?", 60).split()
    assert said == b"well?"
    return int(number)


def is_alive(number: int) -> bool:
    return Path(f"/proc/{number}").exists()


def test_a_child_that_was_started_ahead_is_the_one_that_answers(children: Children) -> None:
    children.start()
    ahead = children._idle.queue[0]._process.pid  # type: ignore[attr-defined]
    assert is_alive(ahead)
    assert ask(children) == ahead


def test_a_child_that_was_started_ahead_for_nothing_ends(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("devices.child.AHEAD_S", 0.05)
    children.start()
    ahead = children._idle.queue[0]._process.pid  # type: ignore[attr-defined]
    eventually(lambda: not is_alive(ahead))
    assert ask(children) != ahead


def test_only_what_is_kept_is_asked_again_and_nothing_outlives_the_end(children: Children) -> None:
    first = ask(children)
    assert is_alive(first) is children._keep
    second = ask(children)
    assert (second == first) is children._keep
    children.start()
    children.close()
    assert not is_alive(second)


def test_a_child_that_died_while_it_waited_is_an_error_and_the_next_one_answers(children: Children) -> None:
    children.start()
    children._idle.queue[0]._process.terminate()  # type: ignore[attr-defined]
    with pytest.raises(RunError, match="who: the child exited with code -15"):
        ask(children)
    assert ask(children)
