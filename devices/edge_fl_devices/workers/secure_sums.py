"""Takes part in secure sums: one `SumDevice` per sum, with a vector that the device's worker supplies.

Secrets are in memory only: a device that restarts has dropped out of its sums. With a certificate a device takes part in masked sums only,
without one in sums that are not masked. An error ends the sum for this device; the server gets its failure word, the log its text.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edge_fl.errors import EdgeFLError, SecureSumError
from edge_fl.wire.blob import split
from edge_fl.wire.messages import SumReply, SumRequest, SumStep, encode
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import UNTYPED, Packet

if TYPE_CHECKING:  # loaded with the first sum: it takes 1.4 MB
    from edge_fl.secure.device import SumDevice

log = logging.getLogger(__name__)

REMEMBERED_SUMS = 16
EXPIRY_S = 600

Offer = Callable[[SumRequest], NDArray[np.float64] | None]


@dataclass(frozen=True, slots=True)
class SumAnswered:
    """The answer to a stage of a secure sum, if there is one to send, and the bytes of the blob that it describes."""

    reply: SumReply | None = None
    payload: bytes = b""

    def packets(self, topics: Topics, device: str) -> Iterator[Packet]:
        """Yield the reply, then the chunks of the blob. Raises ProtocolError for one that does not fit the wire."""
        if self.reply is None:
            return
        yield Packet(topics.sum_reply(device), encode(self.reply), expiry_s=EXPIRY_S)
        for index, chunk in enumerate(split(self.payload)):
            topic = topics.sum_chunk(device, self.reply.id, index)
            yield Packet(topic, bytes(chunk), content_type=UNTYPED, expiry_s=EXPIRY_S)


class SumParticipant:
    """A device's part in all secure sums. `answer` runs in worker threads, one call at a time.

    offer: returns the vector for a request, or None to take no part. summed: called once the vector is in a sum that can complete; if it
    fails, the device drops out. identity: the folder with the device's certificate.
    """

    def __init__(
        self,
        device: str,
        fleet: str,
        identity: Path | None,
        offer: Offer,
        summed: Callable[[SumRequest], None],
    ) -> None:
        self._device, self._fleet, self._identity = device, fleet, identity
        self._offer, self._summed = offer, summed
        self._sums: dict[str, tuple[SumRequest, SumDevice]] = {}
        self._lock = threading.Lock()

    def answer(self, step: SumStep) -> SumAnswered:
        """Answer one step. Raises nothing."""
        with self._lock:
            try:
                return self._answer(step)
            except SecureSumError as error:
                log.warning("%s: secure sum %s: %s", self._device, step.id, error)
                return _declined(step, error.why)
            except (EdgeFLError, OSError) as error:
                log.warning("%s: secure sum %s: %s; taking no part", self._device, step.id, error)
            except Exception:
                log.exception("%s: secure sum %s failed; taking no part", self._device, step.id)
            return _declined(step, "error")

    def _answer(self, step: SumStep) -> SumAnswered:
        if step.id not in self._sums:
            if step.stage != "open" or step.request is None:
                return SumAnswered()  # of an earlier process of this device
            if (vector := self._offer(step.request)) is None:
                return _declined(step, "nothing")
            self._begin(step.id, step.request, vector)
        request, own = self._sums[step.id]
        if (answer := own.answer(step)) is None:
            return SumAnswered()
        if answer.reply.stage == ("signature" if request.masked else "vector"):
            self._summed(request)  # before it is sent: from now on the others can complete the sum
        return SumAnswered(answer.reply, answer.payload)

    def _begin(self, id: str, request: SumRequest, vector: NDArray[np.float64]) -> None:
        from edge_fl.secure.device import SumDevice
        from edge_fl.secure.member import Member

        member = Member.of(self._identity) if self._identity else None
        own = SumDevice(self._fleet, self._device, id, request, np.asarray(vector, np.float64), member)
        self._sums = dict([*self._sums.items(), (id, (request, own))][-REMEMBERED_SUMS:])


def _declined(step: SumStep, why: str) -> SumAnswered:
    return SumAnswered(SumReply(step.id, "declined", reason=why))
