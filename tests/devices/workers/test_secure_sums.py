"""A device's part in secure sums: which ones it begins, and that nothing it receives stops it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from edge_fl.errors import ConfigError
from edge_fl.wire.messages import SumKeys, SumReply, SumRequest, SumStep
from edge_fl_devices.workers.secure_sums import REMEMBERED_SUMS, SumParticipant
from tests.fuzz.valid import structs

REQUEST = SumRequest("statistics", 7, 4, minimum=3, masked=False)


def participant(offer: Any = lambda request: np.ones(4), identity: Path | None = None) -> SumParticipant:
    return SumParticipant("pi-1", "main", identity, offer, lambda request: None)


def reply(sums: SumParticipant, step: SumStep) -> SumReply | None:
    return sums.answer(step).reply


def test_steps_of_a_sum_that_this_process_has_not_begun_are_ignored() -> None:
    sums = participant()
    assert reply(sums, SumStep("s", "peers")) is None
    assert reply(sums, SumStep("s", "open")) is None  # without a request
    assert reply(sums, SumStep("s", "open", REQUEST)) == SumReply("s", "keys", keys=SumKeys())


def test_a_repeated_message_is_answered_once() -> None:
    sums, step = participant(), SumStep("s", "open", REQUEST)
    assert reply(sums, step) and reply(sums, step) is None


@pytest.mark.parametrize(
    ("offered", "why"),
    [
        (lambda request: None, "nothing"),
        (lambda request: np.ones(3), "wrong_length"),
        (lambda request: 1 / 0, "error"),
    ],
)
def test_a_device_without_a_vector_declines(offered: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    assert reply(participant(offered), SumStep("s", "open", REQUEST)) == SumReply("s", "declined", reason=why)


def test_an_unreadable_identity_is_reported_and_the_device_declines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = SumStep("s", "open", SumRequest("statistics", 7, 4))
    assert reply(participant(identity=tmp_path), step) == SumReply("s", "declined", reason="error")
    assert "No such file" in caplog.text and ConfigError.__name__ not in caplog.text


def test_only_the_last_sums_are_remembered() -> None:
    sums = participant()
    for number in range(REMEMBERED_SUMS + 5):
        assert reply(sums, SumStep(f"s-{number}", "open", REQUEST))
    assert list(sums._sums) == [f"s-{number}" for number in range(5, REMEMBERED_SUMS + 5)]


@given(step=structs(SumStep))
def test_no_message_stops_a_device(step: SumStep) -> None:
    sums = participant()
    for _ in range(2):
        answered = reply(sums, step)
        assert answered is None or answered.id == step.id
