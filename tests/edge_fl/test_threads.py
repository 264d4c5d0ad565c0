"""Background threads log and report an exception, and continue or end as they are meant to."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from edge_fl import threads

WAIT_S = 30.0


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(threads, "MAX_PAUSE_S", 0.2)  # a busy machine takes 4 ms for a traceback


def test_a_lasting_thread_starts_again_after_exceptions_and_ends_with_its_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs, reported = [], []

    def run() -> None:
        runs.append(1)
        if len(runs) < 5:
            raise ZeroDivisionError("no divisor")

    thread = threads.lasting(run, "edge-fl-mill", report=reported.append)
    thread.start()
    thread.join(WAIT_S)
    assert len(runs) == 5 and not thread.is_alive() and thread.daemon
    assert reported == ["ZeroDivisionError: no divisor"] * 4
    failures = [record for record in caplog.records if record.exc_info]
    assert len(failures) == 4 and "thread edge-fl-mill: unexpected error" in failures[0].getMessage()
    pauses = [record.getMessage().rsplit(maxsplit=2)[-2] for record in caplog.records if not record.exc_info]
    assert pauses == ["0.05", "0.1", "0.2", "0.2"]


def test_a_lasting_thread_ends_when_its_owner_does() -> None:
    stopped = threading.Event()

    def run() -> None:
        stopped.set()
        raise OSError("closed")

    thread = threads.lasting(run, "edge-fl-mill", stopped=stopped)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_one_piece_of_work_is_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    runs, reported = [], []

    def run() -> None:
        runs.append(1)
        raise KeyError("x")

    thread = threads.once(run, "edge-fl-once", report=reported.append)
    thread.start()
    thread.join(WAIT_S)
    assert runs == [1] and reported == ["KeyError: 'x'"]
    assert "thread edge-fl-once: unexpected error" in caplog.text


def test_a_timer_logs_its_exception_and_can_be_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None:
        raise KeyError("late")

    timer = threads.later(0.0, run, "edge-fl-later")
    timer.join(WAIT_S)
    assert "thread edge-fl-later: unexpected error" in caplog.text
    cancelled = threads.later(WAIT_S, run, "edge-fl-never")
    cancelled.cancel()
    cancelled.join(WAIT_S)
    assert "edge-fl-never" not in caplog.text


def test_work_of_a_pool_logs_its_exception_even_if_the_report_fails(caplog: pytest.LogCaptureFixture) -> None:
    def report(why: str) -> None:
        raise LookupError(why)

    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(threads.guarded(lambda: 1 / 0, "edge-fl-pool", report)).result(WAIT_S)
        assert pool.submit(threads.guarded(lambda: None, "edge-fl-pool")).result(WAIT_S)
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert "its failure could not be reported" in caplog.text
