"""A cohort of devices and a server: results, drop-outs, and what the messages reveal."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from Crypto.Protocol import SecretSharing
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from msgspec.structs import replace

from edge_fl.errors import SecureSumError
from edge_fl.secure import fixed_point, masks, signatures
from edge_fl.secure.device import SumDevice
from edge_fl.secure.fixed_point import Numbers, Vector
from edge_fl.secure.server import SumServer
from edge_fl.secure.terms import Member
from edge_fl.seeds import generator
from edge_fl.wire.messages import SumRequest, SumStep
from tests.edge_fl.secure.cohorts import (
    FLEET,
    LENGTH,
    REQUEST,
    Cohort,
    encodings,
    names_of,
    some,
    total,
    vectors,
)

# results and drop-outs


def test_thirty_devices_add_up_45_000_numbers(thirty: Mapping[str, Member]) -> None:
    cohort = Cohort(thirty, vectors(30, 45_000), SumRequest("statistics", 7, 45_000))
    result = cohort.run()
    assert result.devices == tuple(names_of(30))
    assert np.abs(result.vector - total(cohort, cohort.vectors)).max() <= 1e-6
    assert not cohort.errors and not cohort.rejections


@pytest.mark.parametrize(("count", "stage"), [(30, "shares"), (10, "survivors"), (10, "signatures")])
def test_a_sum_completes_with_30_percent_gone_after_the_key_exchange(
    thirty: Mapping[str, Member], count: int, stage: str
) -> None:
    gone = names_of(count)[:: count // (count * 3 // 10)][: count * 3 // 10]
    cohort = some(thirty, count, gone={stage: gone})
    result = cohort.run()
    remaining = set(names_of(count)) - (set(gone) if stage == "shares" else set())
    assert set(result.devices) == remaining
    assert np.abs(result.vector - total(cohort, remaining)).max() <= 1e-6


@pytest.mark.parametrize(
    ("count", "stage", "text"),
    [
        (30, "shares", "only 12 of 30 devices remained, 20 needed"),
        (10, "peers", "only 4 of 10 devices remained, 7 needed"),
        (10, "survivors", "only 4 of 10 devices remained, 7 needed"),
        (10, "signatures", "only 4 of 10 devices remained, 7 needed"),
    ],
)
def test_a_sum_ends_by_name_with_60_percent_gone(
    thirty: Mapping[str, Member], count: int, stage: str, text: str
) -> None:
    cohort = some(thirty, count, gone={stage: names_of(count * 6 // 10)})
    with pytest.raises(SecureSumError, match=f"^{text}; no statistic was revealed$"):
        cohort.run()
    assert cohort.server.result is None and cohort.server.stage == "ended"


def test_devices_leave_at_every_stage(thirty: Mapping[str, Member]) -> None:
    names = names_of(12)
    cohort = some(
        thirty,
        12,
        gone={"open": names[:1], "peers": names[1:2], "shares": names[2:3], "signatures": names[3:4]},
    )
    result = cohort.run()
    assert list(result.devices) == names[3:]
    assert np.abs(result.vector - total(cohort, names[3:])).max() <= 1e-6


def test_below_the_minimum_no_vector_leaves_a_device(thirty: Mapping[str, Member]) -> None:
    cohort = some(thirty, 5, gone={"open": names_of(1)})
    with pytest.raises(
        SecureSumError, match="4 devices take part, expected 5 to 100; no statistic was revealed"
    ):
        cohort.run()
    assert all(device.expected == "peers" for name, device in cohort.devices.items() if name != "pi-00")


def test_a_device_checks_the_minimum_itself(thirty: Mapping[str, Member]) -> None:
    def fewer(name: str, step: SumStep) -> SumStep:
        return replace(step, keys=dict(list(step.keys.items())[:4]) if step.stage == "peers" else {})

    cohort = some(thirty, 5, tamper=fewer)
    with pytest.raises(SecureSumError, match="only 0 of 5 devices remained"):
        cohort.run()
    assert str(cohort.errors["pi-00"]).startswith("4 devices take part, expected 5 to 100")


def test_without_masks_the_sum_is_the_same_and_has_the_same_limits(thirty: Mapping[str, Member]) -> None:
    masked, plain = some(thirty), some(thirty, request=replace(REQUEST, masked=False))
    assert (masked.run().vector == plain.run().vector).all()
    assert masked.server.result and plain.server.result and not masked.server.result.vectors
    assert plain.server.result.vectors.keys() == plain.vectors.keys()
    for name, vector in plain.server.result.vectors.items():
        assert np.abs(vector - plain.vectors[name]).max() <= 1e-6
    with pytest.raises(SecureSumError, match="4 devices take part"):
        some(thirty, 4, request=replace(REQUEST, masked=False)).run()


def test_a_device_takes_part_in_the_kind_of_sum_that_its_certificate_allows(
    thirty: Mapping[str, Member],
) -> None:
    plain = replace(REQUEST, masked=False)
    with pytest.raises(SecureSumError, match="not masked, and this device has a certificate; expected masks"):
        SumDevice(FLEET, "pi-00", "s", plain, np.zeros(LENGTH), thirty["pi-00"])
    with pytest.raises(SecureSumError, match="without a certificate"):
        SumDevice(FLEET, "pi-00", "s", REQUEST, np.zeros(LENGTH), None)
    with pytest.raises(SecureSumError, match="no certificates, which masked sums require"):
        SumServer(FLEET, "s", REQUEST, names_of(5), [])


def test_noise_has_the_stated_size_whoever_remains(thirty: Mapping[str, Member]) -> None:
    length, z, clip = 20_000, 0.5, 4.0
    request = SumRequest("statistics", 7, length, clip=clip, noise_multiplier=z)
    for gone, least, most in (
        (names_of(3), 1.0, 1.03),
        ((), 1.2, 1.25),
    ):  # threshold 6 of 9; without: sqrt(9 / 6)
        cohort = Cohort(thirty, vectors(9, length), request, gone={"shares": gone})
        result = cohort.run()
        clipped = [v * min(1.0, clip / np.linalg.norm(v)) for n, v in cohort.vectors.items() if n not in gone]
        found = (result.vector - np.sum(clipped, axis=0)).std() / (z * clip)
        assert least - 0.03 <= found <= most


# what the messages reveal


@pytest.mark.parametrize("gone", [{}, {"shares": names_of(2)}])
def test_no_message_contains_a_vector(thirty: Mapping[str, Member], gone: Any) -> None:
    cohort = some(thirty, gone=gone)
    cohort.run()
    traffic = b"".join(cohort.traffic)
    for vector in cohort.vectors.values():
        assert not any(text in traffic for text in encodings(vector, 8))


def test_the_search_finds_a_vector_that_is_not_masked(thirty: Mapping[str, Member]) -> None:
    cohort = some(thirty, request=replace(REQUEST, masked=False))
    cohort.run()
    traffic = b"".join(cohort.traffic)
    assert all(any(text in traffic for text in encodings(v, 8)) for v in cohort.vectors.values())


class Repeatable:
    """Runs cohorts whose random numbers are the same in every run; `shift` is subtracted from the mask that two devices share."""

    def __init__(
        self, thirty: Mapping[str, Member], gone: tuple[str, ...], patch: pytest.MonkeyPatch
    ) -> None:
        self._thirty, self._gone, self._patch = thirty, gone, patch
        self._used: dict[str, set[bytes]] = {}
        patch.setattr(signatures, "ALGORITHM", ec.ECDSA(hashes.SHA256(), deterministic_signing=True))

    def run(
        self, values: Mapping[str, Vector], pair: tuple[str, str], shift: Numbers | None = None
    ) -> tuple[list[bytes], Vector]:
        """All messages and the result."""
        shared = set.intersection(*(self._used[name] for name in pair)) if self._used else set()
        random, drawn = generator(4, "seeds"), iter(range(10**6))
        self._patch.setattr(SecretSharing, "rng", lambda count: next(drawn).to_bytes(count, "big"))
        used: dict[str, set[bytes]] = {name: set() for name in values}

        def options(name: str) -> dict[str, Any]:
            def stream(key: bytes, length: int) -> Numbers:
                used[name].add(key)
                mask = masks.stream(key, length)
                return fixed_point.reduced(mask - shift) if shift is not None and key in shared else mask

            return {"stream": stream, "random": random.bytes}

        cohort = some(self._thirty, vectors=values, gone={"shares": self._gone}, options=options)
        result = cohort.run()
        self._used = used
        return cohort.traffic, result.vector


@pytest.mark.parametrize("gone", [(), ("pi-02", "pi-06")])
def test_other_vectors_with_the_same_total_give_the_same_messages_under_a_bijection_of_the_masks(
    thirty: Mapping[str, Member], gone: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Move an amount from one honest vector to another, and subtract it from the mask that both devices share: no message changes.

    A mask is uniform modulo 2^48 and the subtraction is a bijection, so every transcript is equally probable with either vectors.
    """
    amount = np.round(generator(9, "amount").normal(size=LENGTH) * 50)  # exact in fixed point
    before, pair = vectors(8, LENGTH), ("pi-01", "pi-05")
    after = {**before, "pi-01": before["pi-01"] + amount, "pi-05": before["pi-05"] - amount}
    repeatable = Repeatable(thirty, gone, monkeypatch)
    first, result = repeatable.run(before, pair)
    repeated, _ = repeatable.run(before, pair)
    shifted, same = repeatable.run(after, pair, fixed_point.encode(amount, 8))
    unshifted, _ = repeatable.run(after, pair)
    assert first == repeated == shifted
    assert (result == same).all()
    assert first != unshifted
