"""What a client has to say and has not yet got an answer to: one queue for publications and subscriptions, in order.

It outlives every connection. A window bounds what is under way; a publication leaves when it is acknowledged, however many
connections that takes. Any thread may add to it; the methods that take a message id belong to the connection.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from edge_fl.errors import ProtocolError
from edge_fl.wire.transport import Packet


@dataclass(frozen=True)
class Publication:
    """A packet on its way; `until` is when it expires, on the monotonic clock."""

    number: int
    packet: Packet
    until: float

    @property
    def name(self) -> str:
        return self.packet.topic

    def remaining(self) -> Packet | None:
        """The packet with the expiry that is left of its own, or None when none is."""
        if math.isinf(self.until):
            return self.packet
        left = self.until - time.monotonic()
        return replace(self.packet, expiry_s=math.ceil(left)) if left > 0 else None


@dataclass(frozen=True)
class Filter:
    """A subscription to make, or with `wanted` False to take back."""

    number: int
    pattern: str
    wanted: bool
    qos: int = 1

    @property
    def name(self) -> str:
        return f"the {'subscription' if self.wanted else 'end of the subscription'} {self.pattern}"


class Outgoing:
    """The queue. Items carry ascending numbers, so that `drain` can tell what was there when it was called.

    `changed` guards it, and is notified when all that a `drain` waits for has left.
    """

    def __init__(self, max_bytes: int, changed: threading.Condition) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._last = 0
        self._waiting: deque[Publication | Filter] = deque()
        self._sent: dict[int, Publication] = {}
        self._asked: dict[int, Filter] = {}
        self._awaited: list[int] = []  # the last number of every `drain` that waits
        self._changed = changed

    def publish(self, packet: Packet) -> None:
        """Appends a publication. Raises ProtocolError when more than `max_bytes` would wait."""
        until = math.inf if packet.expiry_s is None else time.monotonic() + packet.expiry_s
        with self._changed:
            if self._bytes + len(packet.payload) > self._max_bytes:
                raise ProtocolError(
                    f"{packet.topic}: {self._bytes} bytes already wait for the broker, at most {self._max_bytes}",
                    consequence="nothing was sent",
                )
            self._bytes += len(packet.payload)
            self._last += 1
            self._waiting.append(Publication(self._last, packet, until))

    def filter(self, pattern: str, *, wanted: bool, qos: int = 1) -> None:
        """Appends a subscription, or the end of one."""
        with self._changed:
            self._last += 1
            self._waiting.append(Filter(self._last, pattern, wanted, qos))

    def send(self, window: int, send: Callable[[Publication | Filter], int | None]) -> None:
        """Hands items to `send` until none waits or `window` publications are under way.

        `send` returns the message id whose answer ends the item, or None when it needs none; it is called under the lock.
        """
        with self._changed:
            while self._waiting:
                item = self._waiting[0]
                if isinstance(item, Publication) and item.packet.qos and len(self._sent) >= window:
                    break
                message_id = send(self._waiting.popleft())
                if isinstance(item, Filter):
                    if message_id is not None:
                        self._asked[message_id] = item
                elif message_id is not None:
                    self._sent[message_id] = item
                else:
                    self._bytes -= len(item.packet.payload)
            self._tell()

    def answered(self, message_id: int) -> Publication | Filter | None:
        """What the answer to `message_id` ends, if anything."""
        if item := self._asked.pop(message_id, None):
            return item
        with self._changed:
            if publication := self._sent.pop(message_id, None):
                self._bytes -= len(publication.packet.payload)
                self._tell()
        return publication

    def resume(self, *, session_present: bool) -> None:
        """A new connection: subscriptions that nobody confirmed go first, unless their owner makes them all again anyway.

        Publications that are under way are the connection's to repeat.
        """
        with self._changed:
            if session_present:
                self._waiting.extendleft(reversed(self._asked.values()))
            self._asked.clear()

    def drain(self, deadline_s: float, over: Callable[[], bool] = lambda: False) -> int:
        """Waits until all that is here now has left, or it is `over`, and returns how many publications have not."""
        with self._changed:
            last = self._last
            self._awaited.append(last)
            self._changed.wait_for(lambda: self._oldest() > last or over(), deadline_s)
            self._awaited.remove(last)
            waiting = sum(isinstance(item, Publication) and item.number <= last for item in self._waiting)
            return waiting + sum(publication.number <= last for publication in self._sent.values())

    def _tell(self) -> None:
        """Wakes those who wait, if one of them can go on: to wake them at every answer costs more than the answer."""
        if self._awaited and self._oldest() > min(self._awaited):
            self._changed.notify_all()

    def _oldest(self) -> float:
        waiting = self._waiting[0].number if self._waiting else math.inf
        return min(waiting, next((publication.number for publication in self._sent.values()), math.inf))
