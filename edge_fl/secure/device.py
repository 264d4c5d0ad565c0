"""A device's side of a secure sum: one object per sum, which answers each stage once and keeps its secrets in memory only.

    open        -> keys       signed public keys
    peers       -> shares     shares of both seeds for every other device, encrypted (not masked: the vector)
    shares      -> vector     vector + self mask +- one mask per pair of devices, modulo 2^48
    survivors   -> signature  of the devices whose vectors arrived
    signatures  -> reveal     for a survivor the share of its self mask, for another device the share of its key

For every device it reveals one of the two shares, once, and only about survivors that enough devices signed: the server cannot obtain a
single vector by giving devices different lists. Any violation ends the sum for this device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from msgspec.structs import replace

from edge_fl.blob import describe
from edge_fl.errors import SecureSumError
from edge_fl.failures import Failure
from edge_fl.secure import fixed_point, masks
from edge_fl.secure.fixed_point import Noise, Numbers, Vector
from edge_fl.secure.masks import SEED_BYTES, Stream
from edge_fl.secure.terms import (
    Member,
    SumTerms,
    require_enough,
    require_signed,
    survivors_content,
    threshold,
)
from edge_fl.wire.messages import SumKeys, SumReply, SumRequest, SumStep


@dataclass(frozen=True)
class SumAnswer:
    """A reply, and the bytes of the blob that it describes."""

    reply: SumReply
    payload: bytes = b""


class SumDevice:
    """Sums `vector` with those of other devices; without `member` the sum is not masked.

    `expected` is the next stage, "" after the last one or a violation.
    """

    def __init__(
        self,
        fleet: str,
        name: str,
        id: str,
        request: SumRequest,
        vector: Vector,
        member: Member | None,
        *,
        random: Callable[[int], bytes] = os.urandom,
        stream: Stream = masks.stream,
        draw: Noise = fixed_point.secret_noise,
    ) -> None:
        if request.masked != bool(member):
            found = (
                "without a certificate" if request.masked else "not masked, and this device has a certificate"
            )
            raise SecureSumError(f"secure sum {id}: {found}; expected masks", Failure.NOT_MASKED)
        if len(vector) != request.length:
            raise SecureSumError(f"{len(vector)} numbers, {request.length} requested", Failure.WRONG_LENGTH)
        self._terms = SumTerms(fleet, id, request)
        self._name, self._vector, self._member = name, vector, member
        self._stream, self._draw = stream, draw
        self._channel_key = masks.private_key(random(SEED_BYTES))
        self._key_seed, self._self_seed = random(SEED_BYTES), random(SEED_BYTES)
        self._key = masks.private_key(self._key_seed)
        self._keys: dict[str, SumKeys] = {}
        self._names: list[str] = []
        self._session = b""
        self._threshold = 0
        self._shares: dict[str, bytes] = {}  # of both seeds, by the device that split them
        self._survivors: list[str] = []
        self._last: SumStep | None = None
        self.expected = "open"

    def answer(self, step: SumStep) -> SumAnswer | None:
        """Answer a stage; None for a repeated message. Raises SecureSumError, which ends the sum for this device."""
        if step == self._last or not self.expected:
            return None
        try:
            if step.stage != self.expected:
                raise SecureSumError(
                    f"stage {step.stage!r}, expected {self.expected!r}; a stage is answered once",
                    Failure.OUT_OF_ORDER,
                )
            self._last = step
            return self._answer(step)
        except SecureSumError:
            self._end()
            raise

    def _answer(self, step: SumStep) -> SumAnswer:
        match step.stage:
            case "open":
                return self._reply("keys", "peers", keys=self._own_keys())
            case "peers":
                return self._on_peers(step)
            case "shares":
                return self._on_shares(step)
            case "survivors":
                return self._on_survivors(step)
            case "signatures":
                return self._on_signatures(step)
            case "result":
                raise AssertionError("no stage of this object")

    def _own_keys(self) -> SumKeys:
        if self._member is None:
            return SumKeys()
        keys = SumKeys(
            self._member.certificate,
            _public(self._channel_key),
            _public(self._key),
            masks.commitment(self._self_seed),
        )
        self._keys[self._name] = replace(
            keys, signature=self._member.sign(self._terms.keys_content(self._name, keys))
        )
        return self._keys[self._name]

    def _on_peers(self, step: SumStep) -> SumAnswer:
        """Check the cohort and split both seeds."""
        own = self._keys.get(self._name, SumKeys())
        if step.keys.get(self._name) != own:
            raise SecureSumError("the cohort has other keys for this device than it sent", Failure.FORGED)
        self._terms.require_cohort(step.keys)
        self._keys, self._names = step.keys, sorted(step.keys)
        self._threshold = threshold(self._terms.request, len(self._names))
        if self._member is None:
            return self._vector_reply(self._encoded(), "")
        for name in self._others:
            self._terms.require_keys(name, step.keys[name], self._member.authorities)
        self._session = self._terms.session(step.keys)
        key_shares = masks.split_seed(self._key_seed, self._threshold, self._names)
        self_shares = masks.split_seed(self._self_seed, self._threshold, self._names)
        texts = {name: key_shares[name] + self_shares[name] for name in self._names}
        self._shares[self._name] = texts[self._name]
        sealed = {peer: masks.seal(self._channel(self._name, peer), texts[peer]) for peer in self._others}
        return self._reply("shares", "shares", values=sealed)

    def _on_shares(self, step: SumStep) -> SumAnswer:
        """Decrypt the shares of the others, and mask the vector."""
        if unknown := sorted(step.values.keys() - set(self._others)):
            raise SecureSumError(f"shares of {unknown[0]}, which is not in the cohort", Failure.FORGED)
        require_enough(len(step.values) + 1, len(self._names), self._threshold)
        for peer, sealed in step.values.items():
            self._shares[peer] = masks.unseal(self._channel(peer, self._name), sealed, peer)
            if len(self._shares[peer]) != 2 * SEED_BYTES:
                raise SecureSumError(f"shares of {peer}: of another length", Failure.FORGED)
        masked = self._encoded() + self._stream(masks.self_mask_key(self._self_seed), len(self._vector))
        for peer in step.values:
            key = masks.agree(
                self._key, self._keys[peer].mask, masks.pair_label(self._session, self._name, peer)
            )
            mask = self._stream(key, len(self._vector))
            masked = masked + mask if masks.sign_of(self._name, peer) > 0 else masked - mask
        return self._vector_reply(masked, "survivors")

    def _on_survivors(self, step: SumStep) -> SumAnswer:
        """Sign the list of survivors, the only one for which this device reveals shares."""
        survivors = sorted(set(step.devices))
        if self._name not in survivors or not self._shares.keys() >= set(survivors):
            raise SecureSumError(
                "survivors: without this device, or with one that sent no shares", Failure.INCONSISTENT
            )
        require_enough(len(survivors), len(self._names), self._threshold)
        self._survivors = survivors
        assert self._member is not None
        signature = self._member.sign(survivors_content(self._session, survivors))
        return self._reply("signature", "signatures", values={self._name: signature})

    def _on_signatures(self, step: SumStep) -> SumAnswer:
        """Check that enough survivors signed the same list, and reveal one share of each device."""
        assert self._member is not None
        content = survivors_content(self._session, self._survivors)
        for name, signature in step.values.items():
            if name not in self._survivors:
                raise SecureSumError(f"signature of {name}, which is not a survivor", Failure.FORGED)
            certificate = self._keys[name].certificate
            require_signed(certificate, name, content, signature, self._member.authorities)
        require_enough(len(step.values), len(self._names), self._threshold)
        revealed = {
            name: both[SEED_BYTES:] if name in self._survivors else both[:SEED_BYTES]
            for name, both in self._shares.items()
        }
        answer = self._reply("reveal", "", values=revealed)
        self._end()
        return answer

    @property
    def _others(self) -> list[str]:
        return [name for name in self._names if name != self._name]

    def _channel(self, sender: str, recipient: str) -> bytes:
        peer = recipient if sender == self._name else sender
        label = masks.channel_label(self._session, sender, recipient)
        return masks.agree(self._channel_key, self._keys[peer].channel, label)

    def _encoded(self) -> Numbers:
        """The vector in fixed point, clipped and with this device's share of the noise."""
        request = self._terms.request
        vector = fixed_point.clipped(self._vector, request.clip)
        if request.noise_multiplier:
            vector = vector + fixed_point.noise_share(
                len(vector), request.clip, request.noise_multiplier, self._threshold, self._draw
            )
        return fixed_point.encode(vector, len(self._names))

    def _vector_reply(self, numbers: Numbers, expected: str) -> SumAnswer:
        payload = fixed_point.to_bytes(fixed_point.reduced(numbers))
        return SumAnswer(self._reply("vector", expected, blob=describe(payload)).reply, payload)

    def _reply(self, stage: str, expected: str, **fields: object) -> SumAnswer:
        self.expected = expected
        return SumAnswer(SumReply(self._terms.id, stage, **fields))  # type: ignore[arg-type]

    def _end(self) -> None:
        """Forget all secrets."""
        self.expected = ""
        self._shares, self._key_seed, self._self_seed = {}, b"", b""
        self._vector = self._vector[:0]


def _public(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()
