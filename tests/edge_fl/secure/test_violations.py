"""Devices and a server that deviate from the protocol: every violation has a name and reveals nothing."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from edge_fl.blob import describe
from edge_fl.errors import SecureSumError
from edge_fl.secure import fixed_point
from edge_fl.secure.device import SumAnswer, SumDevice
from edge_fl.secure.terms import Member
from edge_fl.wire.messages import SumReply, SumStep
from tests.edge_fl.secure.cohorts import (
    FLEET,
    LENGTH,
    REQUEST,
    Cohort,
    members,
    names_of,
    some,
    total,
    vectors,
)
from tests.fuzz.valid import structs

few = settings(max_examples=15)  # for each stage


def rejected(cohort: Cohort) -> str:
    """The error that ends a cohort's sum."""
    with pytest.raises(SecureSumError, match="no statistic was revealed") as raised:
        cohort.run()
    assert cohort.server.result is None
    return str(raised.value)


def at(stage: str, change: Callable[[SumStep], SumStep], only: str = "") -> Callable[[str, SumStep], SumStep]:
    """A server that changes one stage, for all devices or one."""
    return lambda name, step: change(step) if step.stage == stage and only in ("", name) else step


def reply_at(stage: str, only: str, **changes: Any) -> Callable[[str, SumAnswer], SumAnswer]:
    """A device that changes its reply."""

    def change(name: str, answer: SumAnswer) -> SumAnswer:
        if name != only or answer.reply.stage != stage:
            return answer
        return SumAnswer(replace(answer.reply, **changes), answer.payload)

    return change


@pytest.mark.parametrize("length", [LENGTH - 1, LENGTH + 1, 1])
def test_a_masked_vector_of_the_wrong_length_drops_its_device(
    thirty: Mapping[str, Member], length: int
) -> None:
    payload = bytes(length * fixed_point.BYTES)

    def change(name: str, answer: SumAnswer) -> SumAnswer:
        wrong = name == "pi-03" and answer.reply.stage == "vector"
        return SumAnswer(replace(answer.reply, blob=describe(payload)), payload) if wrong else answer

    cohort = some(thirty, tamper_reply=change)
    result = cohort.run()
    assert [str(error) for error in cohort.rejections] == [
        f"pi-03: vector of {len(payload)} bytes, expected 300; no statistic was revealed"
    ]
    assert cohort.server.dropped == {"pi-03": "wrong_length"}
    others = [name for name in names_of(8) if name != "pi-03"]
    assert np.abs(result.vector - total(cohort, others)).max() <= 1e-6


def test_a_corrupt_chunk_drops_its_device(thirty: Mapping[str, Member]) -> None:
    def change(name: str, answer: SumAnswer) -> SumAnswer:
        corrupt = name == "pi-03" and answer.reply.stage == "vector"
        return with_fields(answer, payload=bytes(len(answer.payload))) if corrupt else answer

    cohort = some(thirty, tamper_reply=change)
    assert "pi-03" not in cohort.run().devices
    assert cohort.server.dropped == {"pi-03": "blob_hash"}


def test_a_vector_of_the_wrong_length_or_range_is_not_sent(thirty: Mapping[str, Member]) -> None:
    with pytest.raises(SecureSumError, match="49 numbers, 50 requested"):
        SumDevice(FLEET, "pi-00", "s", REQUEST, np.zeros(LENGTH - 1), thirty["pi-00"])
    wrong = vectors(8, LENGTH)
    wrong["pi-02"] = wrong["pi-02"] * np.nan
    cohort = some(thirty, vectors=wrong)
    assert "pi-02" not in cohort.run().devices
    assert cohort.errors["pi-02"].why == cohort.server.dropped["pi-02"] == "out_of_range"


def test_keys_of_an_earlier_sum_are_rejected(thirty: Mapping[str, Member]) -> None:
    earlier = some(thirty, id="sum-0")
    earlier.run()
    keys = dict(earlier.server._keys)

    replaying_device = some(thirty, tamper_reply=reply_at("keys", "pi-03", keys=keys["pi-03"]))
    assert "pi-03" not in replaying_device.run().devices
    assert "pi-03: its signature is not on this message: forged or replayed" in str(
        replaying_device.rejections[0]
    )

    replaying_server = some(
        thirty, tamper=at("peers", lambda step: replace(step, keys={**step.keys, "pi-03": keys["pi-03"]}))
    )
    assert "only 0 of 8 devices remained" in rejected(replaying_server)
    assert {str(error) for name, error in replaying_server.errors.items() if name != "pi-03"} == {
        "pi-03: its signature is not on this message: forged or replayed; no statistic was revealed"
    }
    assert "other keys for this device than it sent" in str(replaying_server.errors["pi-03"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mask", bytes(31) + b"9"),
        ("channel", bytes(31) + b"9"),
        ("commitment", bytes(32)),
        ("signature", b"no"),
    ],
)
def test_a_server_cannot_put_its_own_key_into_a_cohort(
    thirty: Mapping[str, Member], field: str, value: bytes
) -> None:
    def forge(step: SumStep) -> SumStep:
        return replace(step, keys={**step.keys, "pi-03": replace(step.keys["pi-03"], **{field: value})})

    cohort = some(thirty, tamper=at("peers", forge))
    rejected(cohort)
    assert {error.why for error in cohort.errors.values()} == {"forged"} and len(cohort.errors) == 8


def test_a_certificate_of_another_fleet_or_name_is_rejected(
    thirty: Mapping[str, Member], tmp_path: Path
) -> None:
    stranger = members(tmp_path, 5)["pi-04"]
    cohort = some({**thirty, "pi-04": stranger, "pi-05": thirty["pi-06"]})
    result = cohort.run()
    assert {"pi-04", "pi-05"}.isdisjoint(result.devices)
    texts = sorted(str(error) for error in cohort.rejections)
    assert texts[0].startswith(
        "pi-04: certificate of another CA, expected this device's, from its fleet's CA"
    )
    assert texts[1].startswith("pi-05: certificate of 'pi-06', expected this device's")


def test_devices_notice_that_they_got_different_terms(thirty: Mapping[str, Member]) -> None:
    weaker = replace(REQUEST, threshold=0.51)
    cohort = some(thirty, tamper=at("open", lambda step: replace(step, request=weaker), only="pi-03"))
    cohort.devices["pi-03"] = SumDevice(
        FLEET, "pi-03", "sum-1", weaker, cohort.vectors["pi-03"], thirty["pi-03"]
    )
    assert "pi-03" not in cohort.run().devices
    assert "pi-03: its signature is not on this message" in str(cohort.rejections[0])


def test_devices_notice_that_they_got_different_cohorts(thirty: Mapping[str, Member]) -> None:
    def without_last(step: SumStep) -> SumStep:
        return replace(step, keys={name: keys for name, keys in step.keys.items() if name != "pi-07"})

    cohort = some(thirty, tamper=at("peers", without_last, only="pi-03"))
    cohort.run()
    assert "pi-03: 6 shares, expected 7" in str(cohort.rejections[0])


def test_exchanged_shares_do_not_decrypt(thirty: Mapping[str, Member]) -> None:
    def swap(step: SumStep) -> SumStep:
        values = dict(step.values)
        values["pi-01"], values["pi-02"] = values["pi-02"], values["pi-01"]
        return replace(step, values=values)

    cohort = some(thirty, tamper=at("shares", swap, only="pi-03"))
    assert "pi-03" not in cohort.run().devices
    assert "shares of pi-01: changed or made for other keys" in str(cohort.errors["pi-03"])


def ask(device: SumDevice, stage: Any, **content: Any) -> SumAnswer | None:
    return device.answer(SumStep("sum-1", stage, **content))


def test_a_server_that_asks_for_both_shares_gets_neither(thirty: Mapping[str, Member]) -> None:
    """It tells one device that pi-07 dropped out, although its vector arrived."""

    def lie(step: SumStep) -> SumStep:
        return replace(step, devices=[name for name in step.devices if name != "pi-07"])

    cohort = some(thirty, tamper=at("survivors", lie, only="pi-03"))
    cohort.run()  # of the devices that got the true terms
    assert "its signature is not on this message: forged or replayed" in str(cohort.rejections[0])
    split = some(
        thirty,
        tamper=lambda name, step: lie(step) if step.stage == "survivors" and name < "pi-04" else step,
    )
    assert "only 4 of 8 devices remained, 6 needed" in rejected(split)
    assert not split.server._revealed


def test_a_device_signs_one_list_of_survivors_and_reveals_once(thirty: Mapping[str, Member]) -> None:
    cohort = some(thirty)
    seen: list[SumStep] = []
    cohort.tamper = lambda name, step: (seen.append(step) or step) if name == "pi-03" else step  # type: ignore[func-returns-value]
    cohort.run()
    device = cohort.devices["pi-03"]
    assert device.expected == "" and not device._shares and not device._self_seed
    assert all(device.answer(step) is None for step in seen)  # nothing is answered again

    other = some(thirty, gone={"signatures": names_of(30)})
    rejected(other)
    waiting = other.devices["pi-03"]
    with pytest.raises(
        SecureSumError, match="stage 'survivors', expected 'signatures'; a stage is answered once"
    ):
        ask(waiting, "survivors", devices=names_of(7))
    assert not waiting._shares and waiting.expected == ""


def test_too_few_signatures_reveal_nothing(thirty: Mapping[str, Member]) -> None:
    def fewer(step: SumStep) -> SumStep:
        return replace(step, values=dict(list(step.values.items())[:5]))

    cohort = some(thirty, tamper=at("signatures", fewer))
    assert "only 0 of 8 devices remained, 6 needed" in rejected(cohort)
    assert {error.why for error in cohort.errors.values()} == {"too_few"}


@pytest.mark.parametrize("signer", ["pi-02", "pi-99"])
def test_forged_signatures_of_survivors_reveal_nothing(thirty: Mapping[str, Member], signer: str) -> None:
    forged = thirty["pi-02"].sign("another list")
    cohort = some(
        thirty, tamper=at("signatures", lambda step: replace(step, values={**step.values, signer: forged}))
    )
    assert "only 0 of 8 devices remained, 6 needed" in rejected(cohort)
    assert {error.why for error in cohort.errors.values()} == {"forged"}


@pytest.mark.parametrize("kept", [["pi-00", "pi-01"], ["pi-00", "pi-99", *names_of(8)], names_of(8)[4:]])
def test_a_list_of_survivors_that_cannot_be_is_not_signed(
    thirty: Mapping[str, Member], kept: list[str]
) -> None:
    cohort = some(thirty, tamper=at("survivors", lambda step: replace(step, devices=kept)))
    rejected(cohort)
    assert {error.why for error in cohort.errors.values()} <= {"inconsistent", "too_few"} and cohort.errors


def test_a_wrong_share_is_noticed_and_gives_no_sum(thirty: Mapping[str, Member]) -> None:
    def wrong(name: str, answer: SumAnswer) -> SumAnswer:
        if name != "pi-02" or answer.reply.stage != "reveal":
            return answer
        values = {**answer.reply.values, "pi-05": bytes(16)}
        return SumAnswer(replace(answer.reply, values=values))

    assert "the shares of pi-05 do not give its key" in rejected(some(thirty, tamper_reply=wrong))
    gone = some(thirty, tamper_reply=wrong, gone={"shares": ("pi-05",)})
    assert "the shares of pi-05 do not give its key" in rejected(gone)


def test_replies_that_are_late_or_uninvited_change_nothing(thirty: Mapping[str, Member]) -> None:
    cohort = some(thirty)
    cohort.server.take("pi-99", SumReply("sum-1", "keys"))
    cohort.server.take("pi-00", SumReply("sum-0", "declined"))
    cohort.server.take("pi-00", SumReply("sum-1", "reveal", values={"pi-01": bytes(16)}))
    cohort.server.take_chunk("pi-00", "sum-1", 0, b"early")
    assert cohort.run().devices == tuple(names_of(8)) and not cohort.server.dropped


@pytest.mark.parametrize("stage", ["open", "peers", "shares", "survivors", "signatures"])
@few
@given(data=st.data())
def test_a_device_answers_any_message_or_names_the_violation(
    thirty: Mapping[str, Member], stage: str, data: st.DataObject
) -> None:
    """At every stage of a sum; a device that found a violation answers nothing more."""
    steps: list[SumStep] = []
    cohort = reached(thirty, stage)
    device = cohort.devices["pi-00"]
    for _ in range(3):
        steps.append(replace(data.draw(structs(SumStep)), id="sum-1"))
        try:
            answer = device.answer(steps[-1])
        except SecureSumError as error:
            assert error.why and device.expected == "" and not device._shares
            answer = None
        assert answer is None or answer.reply.stage == "keys"


@pytest.mark.parametrize("stage", ["open", "peers", "shares", "survivors", "signatures"])
@few
@given(data=st.data())
def test_a_server_takes_any_reply_or_names_the_violation(
    thirty: Mapping[str, Member], stage: str, data: st.DataObject
) -> None:
    server = reached(thirty, stage).server
    try:
        server.take("pi-00", replace(data.draw(structs(SumReply)), id="sum-1"))
        server.take_chunk("pi-00", "sum-1", 0, data.draw(st.binary(max_size=20)))
    except SecureSumError as error:
        assert server.dropped == {"pi-00": error.why}


def reached(thirty: Mapping[str, Member], stage: Any) -> Cohort:
    """A cohort whose devices wait for the step of a stage."""
    cohort = some(thirty, 3, request=replace(REQUEST, minimum=3), gone={stage: names_of(30)})
    with suppress(SecureSumError):
        cohort.run()
    cohort.server.stage = {
        "open": "keys",
        "peers": "shares",
        "shares": "vector",
        "survivors": "signature",
        "signatures": "reveal",
    }[stage]  # type: ignore[assignment]
    return cohort
