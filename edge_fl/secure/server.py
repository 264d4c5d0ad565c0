"""The server's side of a secure sum: collect each stage's replies, and start the next when all have arrived or time is up.

A device that sends nothing or something invalid drops out. Before the vectors it is left out of the sum; afterwards the others' shares of
its key replace it. Fewer remaining devices than the threshold end the sum. No input or output here: the caller sends the steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from edge_fl.blob import Assembly
from edge_fl.errors import ArtefactError, SecureSumError
from edge_fl.failures import Failure
from edge_fl.secure import fixed_point, masks
from edge_fl.secure.fixed_point import BYTES, Vector
from edge_fl.secure.masks import SEED_BYTES, Stream
from edge_fl.secure.signatures import Authorities
from edge_fl.secure.terms import SumTerms, require_enough, require_signed, survivors_content, threshold
from edge_fl.wire.messages import MAX_SUM_DEVICES, SumKeys, SumReply, SumRequest, SumStep

Stage = Literal["keys", "shares", "vector", "signature", "reveal", "ended"]


@dataclass(frozen=True)
class Sum:
    """The sum `id` of the vectors of `devices`; `epsilon`: of a device's vector, with noise (0: without).

    `vectors`: that of each device, of a sum that is not masked.
    """

    id: str
    vector: Vector
    devices: tuple[str, ...]
    epsilon: float = 0.0
    vectors: Mapping[str, Vector] = field(default_factory=dict)


class SumServer:
    """One secure sum over the devices `invited`. `stage` is what it waits for, `dropped` why devices no longer take part.

    last: by device, the number of the opening of the last sum for which a vector of it arrived.
    """

    def __init__(
        self,
        fleet: str,
        id: str,
        request: SumRequest,
        invited: Collection[str],
        authorities: Authorities,
        *,
        last: Mapping[str, int] = {},
        stream: Stream = masks.stream,
    ) -> None:
        if request.masked and not authorities:
            raise SecureSumError(
                "the fleet has no certificates, which masked sums require; nothing was requested",
                Failure.NO_CERTIFICATE,
            )
        self.id, self.request = id, request
        self._terms, self._authorities, self._stream = SumTerms(fleet, id, request), authorities, stream
        self._invited, self._last = frozenset(invited), last
        self._keys: dict[str, SumKeys] = {}
        self._names: list[str] = []
        self._session = b""
        self._threshold = 0
        self._sealed: dict[str, Mapping[str, bytes]] = {}
        self._assemblies: dict[str, Assembly] = {}
        self._total = np.zeros(request.length, np.uint64)
        self._sent: set[str] = set()  # devices that announced a vector
        self._added: set[str] = set()
        self._plain: dict[str, bytes] = {}
        self._survivors: list[str] = []
        self._signatures: dict[str, bytes] = {}
        self._revealed: dict[str, Mapping[str, bytes]] = {}
        self.stage: Stage = "keys"
        self.dropped: dict[str, str] = {}
        self.result: Sum | None = None

    @property
    def waiting(self) -> set[str]:
        """Devices whose reply the current stage waits for."""
        asked: Collection[str]
        done: Collection[str]
        match self.stage:
            case "keys":
                asked, done = self._invited, self._keys
            case "shares":
                asked, done = self._names, self._sealed
            case "vector":
                asked, done = self._sealed if self.request.masked else self._names, self._added
            case "signature":
                asked, done = self._survivors, self._signatures
            case "reveal":
                asked, done = self._survivors, self._revealed
            case "ended":
                asked, done = (), ()
        return set(asked) - set(done) - self.dropped.keys()

    @property
    def taking_part(self) -> frozenset[str]:
        """Devices that have sent keys: they have a vector."""
        return frozenset(self._keys)

    def require_minimum(self) -> None:
        """Raise SecureSumError, with the reasons of the others, if fewer devices than the minimum take part."""
        self._require_cohort(dict([*self._keys.items()][:MAX_SUM_DEVICES]))

    def open(self) -> dict[str, SumStep]:
        """The first step of every invited device."""
        return {
            name: SumStep(self.id, "open", self.request, last=self._last.get(name, 0))
            for name in self._invited
        }

    def settled(self) -> dict[str, SumStep]:
        """After the end: the step that says which devices are in the sum, none if it failed; for those that sent a vector."""
        devices = list(self.result.devices) if self.result else []
        return self._to_all(sorted(self._sent), SumStep(self.id, "result", devices=devices))

    def drop(self, device: str, why: str) -> None:
        """No longer wait for a device."""
        if device in self.waiting:
            self.dropped[device] = why
            self._assemblies.pop(device, None)

    def take(self, device: str, reply: SumReply) -> None:
        """Take a reply. Raises SecureSumError for an invalid one, whose device drops out; one that is late is ignored."""
        if reply.id != self.id or device not in self.waiting:
            return
        if reply.stage == "declined":
            self.drop(device, reply.reason or reply.stage)
        elif reply.stage == self.stage:
            try:
                self._take(device, reply)
            except SecureSumError as error:
                self.drop(device, error.why or Failure.ERROR)
                raise

    def _take(self, device: str, reply: SumReply) -> None:
        match reply.stage:
            case "keys":
                keys = reply.keys or SumKeys()
                if self.request.masked:
                    self._terms.require_keys(device, keys, self._authorities)
                self._keys[device] = keys
            case "shares":
                self._require_names(device, "shares", reply.values, set(self._names) - {device})
                self._sealed[device] = reply.values
            case "vector":
                expected = self.request.length * BYTES
                if reply.blob is None or reply.blob.bytes != expected:
                    found = reply.blob.bytes if reply.blob else 0
                    raise SecureSumError(
                        f"{device}: vector of {found} bytes, expected {expected}", Failure.WRONG_LENGTH
                    )
                self._assemblies[device] = Assembly(reply.blob)
                self._sent.add(device)
            case "signature":
                signature = reply.values.get(device, b"")
                content = survivors_content(self._session, self._survivors)
                certificate = self._keys[device].certificate
                require_signed(certificate, device, content, signature, self._authorities)
                self._signatures[device] = signature
            case "reveal":
                self._require_names(device, "revealed shares", reply.values, self._sealed.keys())
                if any(len(value) != SEED_BYTES for value in reply.values.values()):
                    raise SecureSumError(f"{device}: revealed shares of another length", Failure.WRONG_LENGTH)
                self._revealed[device] = reply.values

    def take_chunk(self, device: str, id: str, index: int, payload: bytes) -> None:
        """Take a chunk of a vector, after its reply. Raises SecureSumError for one that does not fit."""
        assembly = self._assemblies.get(device)
        if id != self.id or assembly is None or self.stage != "vector":
            return
        try:
            complete = assembly.add(index, payload)
        except ArtefactError as error:
            self.drop(device, Failure.BLOB_HASH)
            raise SecureSumError(f"{device}: {error.message}", Failure.BLOB_HASH) from error
        if complete:
            payload = self._assemblies.pop(device).join()
            self._total += fixed_point.from_bytes(payload)
            self._added.add(device)
            if not self.request.masked:
                self._plain[device] = payload

    def advance(self) -> dict[str, SumStep]:
        """End the stage; return the steps to send next, none after the last stage. Raises SecureSumError if too few devices remain."""
        try:
            return self._advance()
        except SecureSumError:
            self.stage = "ended"
            raise

    def _advance(self) -> dict[str, SumStep]:
        match self.stage:
            case "keys":
                self._require_cohort(self._keys)
                self._names, self._session = sorted(self._keys), self._terms.session(self._keys)
                self._threshold = threshold(self.request, len(self._names))
                self.stage = "shares" if self.request.masked else "vector"
                return self._to_all(self._names, SumStep(self.id, "peers", keys=self._keys))
            case "shares":
                self._require_enough(len(self._sealed))
                self.stage = "vector"
                return {
                    name: SumStep(self.id, "shares", values=self._shares_for(name)) for name in self._sealed
                }
            case "vector":
                self._require_enough(len(self._added))
                self._survivors = sorted(self._added)
                if not self.request.masked:
                    return self._finish()
                self.stage = "signature"
                return self._to_all(self._survivors, SumStep(self.id, "survivors", devices=self._survivors))
            case "signature":
                self._require_enough(len(self._signatures))
                self.stage = "reveal"
                return self._to_all(self._survivors, SumStep(self.id, "signatures", values=self._signatures))
            case "reveal":
                self._require_enough(len(self._revealed))
                self._remove_masks()
                return self._finish()
            case "ended":
                return {}

    def _remove_masks(self) -> None:
        """Subtract the self masks of survivors, and the masks that survivors share with devices that dropped out."""
        for name in self._sealed:
            parts = {sender: values[name] for sender, values in self._revealed.items()}
            seed = masks.combine_shares(parts, self._threshold, self._names)
            if name in self._survivors:
                self._require_seed(name, masks.commitment(seed) == self._keys[name].commitment)
                self._total -= self._stream(masks.self_mask_key(seed), self.request.length)
                continue
            key = masks.private_key(seed)
            self._require_seed(name, key.public_key().public_bytes_raw() == self._keys[name].mask)
            for peer in self._survivors:
                label = masks.pair_label(self._session, name, peer)
                mask = self._stream(masks.agree(key, self._keys[peer].mask, label), self.request.length)
                # the survivor added the mask with its own sign
                self._total = self._total - mask if masks.sign_of(peer, name) > 0 else self._total + mask

    def _finish(self) -> dict[str, SumStep]:
        self.stage = "ended"
        devices = len(self._names)
        each = {
            name: fixed_point.decode(fixed_point.from_bytes(self._plain[name]), devices)
            for name in sorted(self._plain)
        }
        total = fixed_point.decode(self._total, devices)
        self.result = Sum(self.id, total, tuple(self._survivors), vectors=each)
        return {}

    def _shares_for(self, name: str) -> dict[str, bytes]:
        return {sender: values[name] for sender, values in self._sealed.items() if sender != name}

    def _require_cohort(self, keys: Mapping[str, SumKeys]) -> None:
        """Raise SecureSumError for a cohort that is too small, with the reasons of those that take no part."""
        try:
            self._terms.require_cohort(keys)
        except SecureSumError as error:
            found = ", ".join(
                f"{count} {'with nothing to add' if why == Failure.NOTHING else why}"
                for why, count in sorted(Counter(self.dropped.values()).items())
            )
            raise SecureSumError(error.message + (f" ({found})" if found else ""), error.why) from error

    def _require_enough(self, remaining: int) -> None:
        require_enough(remaining, len(self._names), self._threshold)

    def _require_seed(self, name: str, fits: bool) -> None:
        if not fits:
            raise SecureSumError(f"the shares of {name} do not give its key", Failure.FORGED)

    def _require_names(
        self, device: str, what: str, values: Mapping[str, bytes], names: Collection[str]
    ) -> None:
        if values.keys() != set(names):
            raise SecureSumError(
                f"{device}: {len(values)} {what}, expected {len(names)}, one per device", Failure.INCONSISTENT
            )

    @staticmethod
    def _to_all(names: Collection[str], step: SumStep) -> dict[str, SumStep]:
        return dict.fromkeys(names, step)
