"""Child processes respond and end; one that was started ahead serves the first request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from edge_fl.errors import RunError
from edge_fl_devices.child import Children
from tests.devices.scripted import eventually


@pytest.fixture(params=[False, True], ids=["once", "kept"])
def children(request: pytest.FixtureRequest) -> Iterator[Children]:
    with closing(Children("tests.devices.echo_child", "who", keep=request.param)) as children:
        yield children


def request(children: Children) -> int:
    number, payload = children.request(b"well?", 60).split()
    assert payload == b"well?"
    return int(number)


def is_alive(number: int) -> bool:
    return Path(f"/proc/{number}").exists()


def test_a_child_started_ahead_serves_the_first_request(children: Children) -> None:
    children.start()
    ahead = children._idle.queue[0]._process.pid  # type: ignore[attr-defined]
    assert is_alive(ahead)
    assert request(children) == ahead


def test_an_unused_child_started_ahead_ends(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_fl_devices.child.AHEAD_S", 0.05)
    children.start()
    ahead = children._idle.queue[0]._process.pid  # type: ignore[attr-defined]
    eventually(lambda: not is_alive(ahead))
    assert request(children) != ahead


def test_only_kept_children_are_reused_and_none_outlives_close(children: Children) -> None:
    first = request(children)
    assert is_alive(first) is children._keep
    second = request(children)
    assert (second == first) is children._keep
    children.start()
    children.close()
    assert not is_alive(second)


def test_a_child_that_died_while_idle_is_an_error_and_the_next_one_responds(children: Children) -> None:
    children.start()
    children._idle.queue[0]._process.terminate()  # type: ignore[attr-defined]
    with pytest.raises(RunError, match="who: the child exited with code -15"):
        request(children)
    assert request(children)


@pytest.mark.parametrize(
    ("message", "kind"),
    [("x.so: failed to map segment from shared object", MemoryError), ("No module named 'x'", RunError)],
)
def test_a_library_that_does_not_fit_into_the_memory_is_out_of_memory(
    children: Children, message: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=f"who: ImportError: import: {message}; no result"):
        children.request(f"import: {message}".encode(), 60)
