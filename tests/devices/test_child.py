"""Child processes respond and end; one that was started ahead serves the first request."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from edge_fl.errors import ChildError, DeadlineError, KilledError, RunError, StoppedError
from edge_fl_devices import child
from edge_fl_devices.child import Children
from edge_fl_devices.runtime.runner import Runner
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
    with pytest.raises(KilledError, match=r"who: the child was ended by SIGTERM \(terminated\)"):
        request(children)
    assert request(children)


@pytest.mark.parametrize(
    ("message", "kind"),
    [("x.so: failed to map segment from shared object", MemoryError), ("No module named 'x'", ChildError)],
)
def test_a_library_that_does_not_fit_into_the_memory_is_out_of_memory(
    children: Children, message: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=f"who: ImportError: import: {message}; no result"):
        children.request(f"import: {message}".encode(), 60)


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGILL", "SIGBUS", "SIGABRT", "SIGFPE", "SIGTERM"])
def test_a_death_by_signal_is_named_and_the_next_child_responds(children: Children, name: str) -> None:
    with pytest.raises(KilledError, match=f"who: the child was ended by {name} ") as found:
        children.request(f"signal {name}".encode(), 60)
    assert found.value.signal == name
    assert request(children)


def test_a_child_that_the_system_killed_was_out_of_memory(children: Children) -> None:
    with pytest.raises(MemoryError, match="who: out of memory"):
        children.request(b"signal SIGKILL", 60)


def test_an_exit_code_comes_with_the_last_line_of_the_child(children: Children) -> None:
    with pytest.raises(ChildError, match="who: the child ended with exit code 3: goodbye"):
        children.request(b"exit goodbye", 60)


def test_a_child_that_cannot_load_a_module_says_so() -> None:
    with (
        closing(Children("tests.devices.missing", "who")) as children,
        pytest.raises(ChildError, match=r"who: the child ended with exit code 1: .*No module named"),
    ):
        children.request(b"well?", 60)


def test_only_an_error_raised_on_purpose_is_a_verdict_about_the_request(children: Children) -> None:
    with pytest.raises(RunError, match=r"^the loss is NaN$"):
        children.request(b"diverge", 60)


def test_output_of_a_library_does_not_disturb_the_response(children: Children) -> None:
    assert children.request(b"print", 60).endswith(b" print")


def test_requests_and_responses_may_be_larger_than_a_pipe(children: Children) -> None:
    asked = b"large 9000000" + b" " * 5_000_000
    assert children.request(asked, 60) == asked.ljust(9_000_000)


def test_progress_restarts_the_deadline() -> None:
    counts: list[tuple[int, int]] = []
    with closing(Children("tests.devices.echo_child", "who", keep=True)) as children:
        request(children)  # has started
        assert children.request(b"count 6 0.4", 2.0, lambda done, of: counts.append((done, of)))
        assert counts == [(done, 6) for done in range(1, 7)]


def test_no_progress_for_the_deadline_ends_the_child() -> None:
    with closing(Children("tests.devices.echo_child", "who", keep=True)) as children:
        number = request(children)
        with pytest.raises(DeadlineError, match=r"who: no result and no progress for 0.3 s"):
            children.request(b"count 2 60", 0.3)
        assert not is_alive(number)


def test_progress_outside_a_child_has_no_effect() -> None:
    child.progress(1, 2)


def test_a_stopped_agent_does_not_wait_for_a_child_at_work(children: Children) -> None:
    began = threading.Event()
    ended: list[BaseException] = []

    def work() -> None:
        try:
            children.request(b"count 1000 60", 600, lambda done, of: began.set())
        except StoppedError as error:
            ended.append(error)

    runner, thread = Runner(end_work=children.end), threading.Thread(target=work)
    thread.start()
    assert began.wait(60)
    runner.run(deadline_s=0)
    thread.join(60)
    assert ended and not thread.is_alive()
    with pytest.raises(StoppedError):
        request(children)


def test_none_is_started_ahead_while_one_is_at_work(children: Children) -> None:
    begun = threading.Event()
    thread = threading.Thread(
        target=lambda: children.request(b"count 40 0.05", 60, lambda done, of: begun.set())
    )
    thread.start()
    assert begun.wait(60)
    children.start()
    assert children._idle.empty()
    thread.join()
