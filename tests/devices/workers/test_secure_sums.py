"""A device's part in secure sums: which ones it begins and continues, what it records, and that nothing it receives stops it."""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from msgspec.structs import replace

from edge_fl.errors import ArtefactError, ConfigError
from edge_fl.failures import Failure
from edge_fl.secure.floors import SumFloors
from edge_fl.wire.messages import SumKeys, SumReply, SumRequest, SumStep
from edge_fl_broker.provision.authority import Authority
from edge_fl_devices.storage.store import SUMS, Store, SumRecord
from edge_fl_devices.workers.secure_sums import SumParticipant
from tests.fuzz.valid import structs

REQUEST = SumRequest("statistics", 7, 4, masked=False)
COHORT = {f"pi-{number}": SumKeys() for number in range(1, 6)}


@dataclass
class Vectors:
    """A worker's offers: one vector for every sum, and what was recorded about them."""

    vector: Any = field(default_factory=lambda: np.ones(4))
    committed: list[tuple[str, bool]] = field(default_factory=list)
    results: dict[str, list[str]] = field(default_factory=dict)
    fails: Exception | None = None

    def offer(self, id: str, request: SumRequest) -> Any:
        return self.vector() if callable(self.vector) else self.vector

    def commit(self, id: str, request: SumRequest, *, leaves: bool) -> None:
        if self.fails:
            raise self.fails
        self.committed.append((id, leaves))

    def settle(self, id: str, devices: Collection[str]) -> None:
        self.results[id] = list(devices)


def participant(folder: Path, vectors: Vectors | None = None, identity: Path | None = None) -> SumParticipant:
    return SumParticipant("pi-1", "main", identity, vectors or Vectors(), Store(folder))


def reply(sums: SumParticipant, step: SumStep, number: int = 0, rejected: str = "") -> SumReply | None:
    return sums.answer(step, number, rejected).reply


def opening(id: str, request: SumRequest = REQUEST, **fields: Any) -> SumStep:
    return SumStep(id, "open", request, **fields)


def declined(id: str, why: str) -> SumReply:
    return SumReply(id, "declined", reason=why)


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("ca")
    Authority.make(home).bake({"pi-1": home / "pi-1"})
    return home / "pi-1"


def test_steps_of_a_sum_that_this_process_has_not_begun_are_ignored(tmp_path: Path) -> None:
    sums = participant(tmp_path)
    assert reply(sums, SumStep("s", "peers")) is None
    assert reply(sums, SumStep("s", "open")) is None  # without a request
    assert reply(sums, opening("s")) == SumReply("s", "keys", keys=SumKeys())


def test_a_repeated_message_is_answered_once(tmp_path: Path) -> None:
    sums, step = participant(tmp_path), opening("s")
    assert reply(sums, step) and reply(sums, step) is None


@pytest.mark.parametrize(
    ("offered", "why"),
    [(lambda: None, "nothing"), (lambda: np.ones(3), "wrong_length"), (lambda: 1 / 0, "error")],
)
def test_a_device_without_a_vector_declines(
    tmp_path: Path, offered: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    assert reply(participant(tmp_path, Vectors(offered)), opening("s")) == declined("s", why)
    assert Store(tmp_path).sums().declined.startswith(why) != (why == "nothing")


def test_an_unreadable_identity_is_reported_and_the_device_declines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = opening("s", SumRequest("statistics", 7, 4))
    sums = participant(tmp_path, identity=tmp_path)
    assert reply(sums, step, 1) == declined("s", "error")
    assert "No such file" in caplog.text and ConfigError.__name__ not in caplog.text


def test_a_vector_is_recorded_as_that_of_its_sum_before_it_leaves(tmp_path: Path) -> None:
    vectors = Vectors()
    sums = participant(tmp_path, vectors)
    assert reply(sums, opening("s")) and not vectors.committed
    answer = sums.answer(SumStep("s", "peers", keys=COHORT))
    assert answer.reply and answer.reply.stage == "vector" and answer.payload
    assert vectors.committed == [("s", True)] and Store(tmp_path).sums().id == "s"


@pytest.mark.parametrize("where", ["worker", "record"])
def test_a_vector_that_cannot_be_recorded_does_not_leave_then_or_later(tmp_path: Path, where: str) -> None:
    vectors = Vectors()
    sums = participant(tmp_path, vectors)
    assert reply(sums, opening("s"))
    if where == "worker":
        vectors.fails = ArtefactError("no space", Failure.ENOSPC)
    else:
        (tmp_path / SUMS).mkdir(parents=True)
    peers = SumStep("s", "peers", keys=COHORT)
    assert sums.answer(peers).payload == b""
    vectors.fails = None
    assert sums.answer(peers).payload == sums.answer(replace(peers, devices=["pi-2"])).payload == b""


def test_an_opening_ends_the_sum_before_it_whose_vector_then_does_not_leave(tmp_path: Path) -> None:
    vectors = Vectors()
    sums = participant(tmp_path, vectors)
    assert reply(sums, opening("a")) and reply(sums, opening("b"))
    assert sums.answer(SumStep("a", "peers", keys=COHORT)).payload == b""
    assert sums.answer(SumStep("b", "peers", keys=COHORT)).payload
    assert vectors.committed == [("b", True)]


def test_a_device_with_a_certificate_answers_what_is_signed_for_it_in_the_order_of_the_signatures(
    tmp_path: Path, identity: Path
) -> None:
    vectors, masked = Vectors(), SumRequest("statistics", 7, 4)
    sums = participant(tmp_path, vectors, identity)
    assert reply(sums, opening("s", masked)) == declined("s", "unsigned")
    assert reply(sums, opening("s", masked), 9, "wrong_key") == declined("s", "wrong_key")
    first = reply(sums, opening("s", masked), 10)
    assert first and first.stage == "keys"
    # what is not signed, or older, changes nothing of the sum under way
    assert reply(sums, SumStep("s", "peers")) is None
    assert reply(sums, opening("t", masked)) == declined("t", "unsigned")
    assert reply(sums, opening("t", masked), 10) == declined("t", "replayed")
    assert reply(sums, SumStep("s", "result", devices=["pi-1"])) is None and not vectors.results
    members = dict.fromkeys(COHORT, first.keys)
    answer = reply(sums, SumStep("s", "peers", keys=members), 11)
    assert answer == declined("s", "forged")  # the keys of the others are not theirs: it was read


def test_an_opening_from_before_the_last_vector_is_replayed_also_after_a_restart(
    tmp_path: Path,
) -> None:
    vectors = Vectors()
    sums = participant(tmp_path, vectors)
    assert reply(sums, opening("a"), 20) and sums.answer(SumStep("a", "peers", keys=COHORT), 21).payload
    again = participant(tmp_path, vectors)
    for number in (19, 20):
        assert reply(again, opening("a"), number) == declined("a", "replayed")
    assert reply(again, opening("b"), 22)


def test_a_device_that_has_sent_more_than_its_folder_knows_writes_its_pictures_off(tmp_path: Path) -> None:
    vectors = Vectors()
    sums = participant(tmp_path, vectors)
    assert reply(sums, opening("b", last=20), 22) == declined("b", "restored")
    assert vectors.committed == [("b", False)]
    assert Store(tmp_path).sums().number == 20
    assert reply(sums, opening("c", last=20), 23) == SumReply("c", "keys", keys=SumKeys())
    # an unsigned statement proves nothing
    assert reply(sums, opening("d", last=30)) == SumReply("d", "keys", keys=SumKeys())


def test_a_device_that_has_nothing_to_write_off_does_so_when_it_has(tmp_path: Path) -> None:
    vectors = Vectors(None)
    sums = participant(tmp_path, vectors)
    assert reply(sums, opening("b", last=20), 22) == declined("b", "nothing")
    vectors.vector = np.ones(4)
    assert reply(sums, opening("c", last=20), 23) == declined("c", "restored")


def test_the_result_is_passed_on(tmp_path: Path) -> None:
    vectors = Vectors()
    assert reply(participant(tmp_path, vectors), SumStep("s", "result", devices=["pi-1", "pi-2"])) is None
    assert vectors.results == {"s": ["pi-1", "pi-2"]}


@pytest.mark.parametrize(
    ("floors", "terms", "text"),
    [
        ({}, {"minimum": 3}, "minimum 3, expected 5 or more"),
        ({}, {"threshold": 0.501}, "threshold 0.501, expected 0.6667 or more"),
        ({"clip": 2.0}, {}, "clip 0, expected above 0 and at most 2"),
        ({"clip": 2.0}, {"clip": 3.0}, "clip 3, expected"),
        (
            {"noise_multiplier": 1.0},
            {"clip": 1.0, "noise_multiplier": 0.5},
            "noise_multiplier 0.5, expected 1",
        ),
        (
            {"minimum": 20},
            {"threshold": 0.501},
            "minimum 5, expected 20 or more; threshold 0.501, expected 0.6667",
        ),
    ],
)
def test_terms_below_the_owners_floors_are_declined_by_name(
    tmp_path: Path, floors: Any, terms: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    vectors = Vectors()
    sums = SumParticipant("pi-1", "main", None, vectors, Store(tmp_path), SumFloors(**floors))
    assert reply(sums, opening("s", replace(REQUEST, **terms))) == declined("s", "below_floor")
    assert text in caplog.text and text in Store(tmp_path).sums().declined


def test_terms_at_the_floors_are_accepted(tmp_path: Path) -> None:
    floors = SumFloors(8, 0.75, 2.0, 1.0)
    request = replace(REQUEST, minimum=8, threshold=0.75, clip=2.0, noise_multiplier=1.0)
    assert reply(
        SumParticipant("pi-1", "main", None, Vectors(), Store(tmp_path), floors), opening("s", request)
    )


def test_a_sum_that_follows_clears_why_the_device_took_no_part(tmp_path: Path) -> None:
    sums = participant(tmp_path)
    assert reply(sums, opening("s", replace(REQUEST, minimum=3))) == declined("s", "below_floor")
    assert reply(sums, opening("t")) and sums.answer(SumStep("t", "peers", keys=COHORT)).payload
    assert Store(tmp_path).sums() == SumRecord("t")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(step=structs(SumStep))
def test_no_message_stops_a_device(tmp_path: Path, step: SumStep) -> None:
    sums = participant(tmp_path)
    for number in (0, 0, 5):
        answered = reply(sums, step, number)
        assert answered is None or answered.id == step.id
