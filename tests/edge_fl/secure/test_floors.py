"""Why a device has floors: what a server that deviates from the protocol learns with colluders, and how many it needs at the floors."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from edge_fl.errors import SecureSumError
from edge_fl.secure import fixed_point, masks
from edge_fl.secure.device import SumDevice
from edge_fl.secure.fixed_point import Vector
from edge_fl.secure.floors import DEFAULT
from edge_fl.secure.masks import SEED_BYTES
from edge_fl.secure.terms import Member, survivors_content, threshold
from edge_fl.wire.messages import SumRequest, SumStep
from tests.edge_fl.secure.cohorts import FLEET, members, names_of

LENGTH = 8


def vector_of(name: str) -> Vector:
    return np.arange(LENGTH) + 100.0 * int(name.removeprefix("pi-"))


def unmasked(known: Mapping[str, Member], terms: SumRequest, colluders: list[str], victim: str) -> Vector:
    """The victim's vector, from a server that names two lists of survivors, both signed by the colluders.

    Raises SecureSumError where a device notices it.
    """
    names = sorted(known)
    devices = {name: SumDevice(FLEET, name, "s", terms, vector_of(name), known[name]) for name in names}

    def answers(step: SumStep) -> dict[str, dict[str, bytes]]:
        return {name: dict(devices[name].answer(step).reply.values) for name in names}  # type: ignore[union-attr]

    opened = SumStep("s", "open", terms)
    keys = {name: devices[name].answer(opened).reply.keys for name in names}  # type: ignore[union-attr]
    sealed = answers(SumStep("s", "peers", keys=keys))  # type: ignore[arg-type]
    payload = b""
    for name in names:
        step = SumStep("s", "shares", values={n: sealed[n][name] for n in names if n != name})
        answer = devices[name].answer(step)
        payload = answer.payload if answer and name == victim else payload
    secrets = {name: devices[name]._shares[victim] for name in colluders}
    session, least = devices[victim]._session, threshold(terms, len(names))

    honest = [name for name in names if name not in colluders and name != victim]
    half = least - len(colluders) - 1
    groups = ([victim, *honest[:half]], honest[half:])
    revealed: list[dict[str, bytes]] = []
    for group, gone in zip(groups, ((), (victim,)), strict=True):
        survivors = sorted(set(names) - set(gone))
        step = SumStep("s", "survivors", devices=survivors)
        signed = {name: devices[name].answer(step).reply.values[name] for name in group}  # type: ignore[union-attr]
        signed |= {name: known[name].sign(survivors_content(session, survivors)) for name in colluders}
        last = SumStep("s", "signatures", values=signed)
        parts = {name: devices[name].answer(last).reply.values[victim] for name in group}  # type: ignore[union-attr]
        place = slice(0, SEED_BYTES) if gone else slice(SEED_BYTES, None)
        revealed.append({**parts, **{name: secrets[name][place] for name in colluders}})

    self_seed, key_seed = (masks.combine_shares(parts, least, names) for parts in revealed)
    key = masks.private_key(key_seed)
    numbers = fixed_point.from_bytes(payload) - masks.stream(masks.self_mask_key(self_seed), LENGTH)
    for peer in names:
        if peer != victim:
            shared = masks.agree(key, keys[peer].mask, masks.pair_label(session, victim, peer))  # type: ignore[union-attr]
            mask = masks.stream(shared, LENGTH)
            numbers = numbers - mask if masks.sign_of(victim, peer) > 0 else numbers + mask
    return fixed_point.decode(numbers, len(names))


@pytest.mark.parametrize("count", [9, pytest.param(99, marks=pytest.mark.nightly)])
def test_one_colluder_unmasks_a_device_at_terms_that_its_floors_decline(tmp_path: Path, count: int) -> None:
    known = members(tmp_path, count)
    terms = SumRequest("statistics", 7, LENGTH, minimum=3, threshold=0.501)
    names = names_of(count)
    found = unmasked(known, terms, names[:1], names[-1])
    np.testing.assert_allclose(found, vector_of(names[-1]), atol=1e-6)
    with pytest.raises(SecureSumError, match=r"minimum 3, expected 5 or more; threshold 0\.501, expected"):
        DEFAULT.require(terms)


def test_at_the_floors_it_takes_a_third_of_the_cohort(tmp_path: Path) -> None:
    known, names = members(tmp_path, 9), names_of(9)
    terms = SumRequest("statistics", 7, LENGTH, DEFAULT.minimum, DEFAULT.threshold)
    DEFAULT.require(terms)
    needed = 2 * threshold(terms, 9) - 9
    assert needed == 3
    with pytest.raises(SecureSumError, match="only 5 of 9 devices remained, 6 needed"):
        unmasked(known, terms, names[: needed - 1], names[-1])
    found = unmasked(known, terms, names[:needed], names[-1])
    np.testing.assert_allclose(found, vector_of(names[-1]), atol=1e-6)


def test_terms_at_the_floors_need_at_least_a_third_of_any_cohort_to_collude() -> None:
    terms = SumRequest("statistics", 7, LENGTH, DEFAULT.minimum, DEFAULT.threshold)
    for devices in range(DEFAULT.minimum, 101):
        assert 2 * threshold(terms, devices) - devices >= devices / 3
    assert 2 * threshold(replace(terms, minimum=3, threshold=0.501), 99) - 99 == 1
