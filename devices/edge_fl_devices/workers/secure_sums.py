"""Takes part in secure sums, one at a time: a `SumDevice` with a vector that the device's worker supplies.

A vector belongs to one sum: before it leaves, masked or not, the worker records on the disk what is in it (`Worker.commit`), so that
nothing of it is offered again, whatever becomes of the sum. An opening ends the sum before it, whose vector then does not leave any more.

A device with a certificate answers only what the server signed for it, in the order of the signatures, and takes part in masked sums
only; without one in sums that are not masked. Terms below the owner's floors are declined. Secrets are in memory only: a device that
restarts has dropped out. An error ends the sum for this device; the server gets its failure word, the log its text. Which sum had the last
vector, and why the device declined a later one, is in the device's store.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from edge_fl.errors import EdgeFLError, SecureSumError
from edge_fl.failures import Failure
from edge_fl.files.paths import text
from edge_fl.secure import floors
from edge_fl.secure.floors import SumFloors
from edge_fl.wire.messages import SumReply, SumRequest, SumStep, encode
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet, chunk_packets
from edge_fl_devices.storage.store import Store, SumRecord
from edge_fl_devices.workers.worker import Worker

if TYPE_CHECKING:  # loaded with the first sum: it takes 1.4 MB
    from edge_fl.secure.device import SumDevice

log = logging.getLogger(__name__)

EXPIRY_S = 600


@dataclass(frozen=True, slots=True)
class SumAnswered:
    """The answer to a stage of a secure sum, if there is one to send, and the bytes of the blob that it describes."""

    reply: SumReply | None = None
    payload: bytes = b""

    def packets(self, topics: Topics, device: str) -> Iterator[Packet]:
        """Yield the reply, then the chunks of the blob. Raises ProtocolError for one that does not fit the wire."""
        if self.reply is None:
            return
        yield Packet(topics.up(device, "sum"), encode(self.reply), expiry_s=EXPIRY_S)
        chunk_topics = partial(topics.up, device, "sum", self.reply.id)
        yield from chunk_packets(chunk_topics, self.payload, expiry_s=EXPIRY_S)


@dataclass(frozen=True)
class _Open:
    """The sum that a device is in; `number`: of the last signed step."""

    id: str
    request: SumRequest
    opened: int
    number: int
    device: SumDevice


class SumParticipant:
    """A device's part in secure sums. `answer` runs in worker threads, one call at a time.

    worker: supplies the vectors. identity: the folder with the device's certificate. store: of its record. least: protection below
    which it takes no part. may_offer: whether it takes part in new sums, as long as no daily budget is used up.
    """

    def __init__(
        self,
        device: str,
        fleet: str,
        identity: Path | None,
        worker: Worker,
        store: Store,
        least: SumFloors = floors.DEFAULT,
        may_offer: Callable[[], bool] = lambda: True,
    ) -> None:
        self._device, self._fleet, self._identity = device, fleet, identity
        self._worker, self._store, self._least, self._may_offer = worker, store, least, may_offer
        self._open: _Open | None = None
        self._lock = threading.Lock()

    def answer(self, step: SumStep, number: int = 0, rejected: str = "") -> SumAnswered:
        """Answer one step. Raises nothing.

        number: of the server's signature on it, 0 without one. rejected: the failure word of a signature that does not count.
        """
        with self._lock:
            try:
                return self._answer(step, number, rejected)
            except SecureSumError as error:
                log.warning("%s: secure sum %s: %s", self._device, step.id, error)
                return self._declined(step, error.why or Failure.ERROR, error.message)
            except (EdgeFLError, OSError) as error:
                log.warning("%s: secure sum %s: %s; taking no part", self._device, step.id, error)
                return self._declined(step, Failure.ERROR, str(error))
            except Exception as error:
                log.exception("%s: secure sum %s failed; taking no part", self._device, step.id)
                return self._declined(step, Failure.ERROR, type(error).__name__)

    def _answer(self, step: SumStep, number: int, rejected: str) -> SumAnswered:
        unsigned = Failure.UNSIGNED if self._identity and not number else ""
        if why := rejected or unsigned or self._replayed(step, number):
            return self._ignored(step, why)
        if step.stage == "result":
            self._worker.settle(step.id, step.devices)
            return SumAnswered()
        if self._open is None or self._open.id != step.id:
            if step.stage != "open" or step.request is None:
                return SumAnswered()  # of an earlier process, or of a sum that ended
            if (found := self._begun(step, step.request, number)) is None:
                return SumAnswered(SumReply(step.id, "declined", reason=Failure.NOTHING))
            self._open = found
        self._open = current = dataclasses.replace(self._open, number=number)
        if (answer := current.device.answer(step)) is None:
            return SumAnswered()
        if answer.reply.stage == "vector":
            self._commit(current)
        return SumAnswered(answer.reply, answer.payload)

    def _replayed(self, step: SumStep, number: int) -> str:
        """Whether a signature is older than the last one; a message that arrives twice has the same."""
        if not number or step.stage == "result":
            return ""
        current = self._open
        last = current.number if current else 0
        if step.stage == "open" and not (current and step.id == current.id):
            last = max(last, self._record.number) + 1
        return Failure.REPLAYED if number < last else ""

    def _ignored(self, step: SumStep, why: str) -> SumAnswered:
        """Decline an opening that the server did not sign for this device now; what is not signed changes no sum that is under way."""
        log.warning("%s: secure sum %s: %s: %s; ignored", self._device, step.id, step.stage, why)
        if step.stage != "open" or (self._open and self._open.id == step.id):
            return SumAnswered()
        return SumAnswered(SumReply(step.id, "declined", reason=why))

    def _begun(self, step: SumStep, request: SumRequest, number: int) -> _Open | None:
        """Begin a sum; None without a vector for it."""
        from edge_fl.secure.device import SumDevice
        from edge_fl.secure.terms import Member

        self._open = None  # before the vector is given to another sum
        self._least.require(request)
        member = Member.of(self._identity) if self._identity else None
        vector = self._worker.offer(step.id, request) if self._may_offer() else None
        if vector is None:
            return None
        if number and step.last > self._record.number:
            self._worker.commit(step.id, request, leaves=False)
            self._store.keep_sums(SumRecord(step.id, step.last))
            raise SecureSumError(
                f"the server has a vector of this device that its folder {text(self._store.folder)} does not know: it was restored from a"
                " backup, copied or made anew. Its pictures so far are in no further sum",
                Failure.RESTORED,
            )
        own = SumDevice(self._fleet, self._device, step.id, request, np.asarray(vector, np.float64), member)
        return _Open(step.id, request, number, number, own)

    def _commit(self, current: _Open) -> None:
        """Record that the vector leaves; if that fails, it does not."""
        try:
            self._worker.commit(current.id, current.request, leaves=True)
            self._store.keep_sums(SumRecord(current.id, max(current.opened, self._record.number)))
        except BaseException:
            self._open = None
            raise

    def _declined(self, step: SumStep, why: str, message: str) -> SumAnswered:
        record = replace(self._record, declined=f"{why}: {message} (sum {step.id})")
        try:
            self._store.keep_sums(record)
        except (EdgeFLError, OSError) as error:  # only `device status` misses it
            log.warning("%s: secure sum %s: %s", self._device, step.id, error)
        return SumAnswered(SumReply(step.id, "declined", reason=why))

    @property
    def _record(self) -> SumRecord:
        return self._store.sums()
