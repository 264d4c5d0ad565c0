"""Outgoing queue of unacknowledged publications and subscriptions, in order.

It outlives connections. A window bounds the unacknowledged publications; a publication is removed when it is acknowledged, after any
number of reconnects. Any thread may add items; methods with a message id belong to the connection.
"""

from __future__ import annotations

import itertools
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
    """A queued packet; `until` is its expiry time on the monotonic clock."""

    number: int
    packet: Packet
    until: float

    @property
    def name(self) -> str:
        return self.packet.topic

    def remaining(self) -> Packet | None:
        """The packet with its remaining expiry, or None when it has expired."""
        if math.isinf(self.until):
            return self.packet
        left = self.until - time.monotonic()
        return replace(self.packet, expiry_s=math.ceil(left)) if left > 0 else None


@dataclass(frozen=True)
class Filter:
    """A subscription, or with `wanted` False an unsubscription."""

    number: int
    pattern: str
    wanted: bool
    qos: int = 1

    @property
    def name(self) -> str:
        return f"the {'subscription to' if self.wanted else 'unsubscription from'} {self.pattern}"


class Outgoing:
    """The queue. Items have ascending numbers, by which `drain` identifies the items present at its call.

    `changed` guards the queue and is notified when a waiting `drain` can return.
    """

    def __init__(self, max_bytes: int, changed: threading.Condition) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._last = 0
        self._waiting: deque[Publication | Filter] = deque()
        self._sent: dict[int, Publication] = {}
        self._unconfirmed: dict[int, Filter] = {}
        self._awaited: list[int] = []  # the last number of each waiting `drain`
        self._changed = changed

    def publish(self, packet: Packet) -> None:
        """Append a publication. Raises ProtocolError when more than `max_bytes` would be queued."""
        until = math.inf if packet.expiry_s is None else time.monotonic() + packet.expiry_s
        with self._changed:
            if self._bytes + len(packet.payload) > self._max_bytes:
                raise ProtocolError(
                    f"{packet.topic}: {self._bytes} bytes are already queued for the broker, at most {self._max_bytes}",
                    consequence="nothing was sent",
                )
            self._bytes += len(packet.payload)
            self._last += 1
            self._waiting.append(Publication(self._last, packet, until))

    def filter(self, pattern: str, *, wanted: bool, qos: int = 1) -> None:
        """Append a subscription or an unsubscription."""
        with self._changed:
            self._last += 1
            self._waiting.append(Filter(self._last, pattern, wanted, qos))

    def send(self, window: int, send: Callable[[Publication | Filter], int | None]) -> None:
        """Pass items to `send` until none is queued or `window` publications are unacknowledged.

        `send` returns the message id whose acknowledgement completes the item, or None if it needs none; it is called under the lock.
        """
        with self._changed:
            while self._waiting:
                item = self._waiting[0]
                if isinstance(item, Publication) and item.packet.qos and len(self._sent) >= window:
                    break
                message_id = send(self._waiting.popleft())
                if isinstance(item, Filter):
                    if message_id is not None:
                        self._unconfirmed[message_id] = item
                elif message_id is not None:
                    self._sent[message_id] = item
                else:
                    self._bytes -= len(item.packet.payload)
            self._notify()

    def acknowledged(self, message_id: int) -> Publication | Filter | None:
        """Remove and return the item that the acknowledgement of `message_id` completes, if any."""
        with self._changed:
            if subscription := self._unconfirmed.pop(message_id, None):
                self._notify()
                return subscription
            if publication := self._sent.pop(message_id, None):
                self._bytes -= len(publication.packet.payload)
                self._notify()
        return publication

    def resume(self, *, session_present: bool) -> None:
        """Prepare for a new connection: unconfirmed subscriptions are sent first, unless their owner makes all of them again.

        Unacknowledged publications are repeated by the connection itself.
        """
        with self._changed:
            if session_present:
                self._waiting.extendleft(reversed(self._unconfirmed.values()))
            self._unconfirmed.clear()
            self._notify()

    def drain(self, deadline_s: float, over: Callable[[], bool] = lambda: False) -> int:
        """Wait until everything queued now, subscriptions included, is acknowledged or `over()`.

        Returns the number of publications that are not acknowledged.
        """
        with self._changed:
            last = self._last
            self._awaited.append(last)
            self._changed.wait_for(lambda: self._oldest() > last or over(), deadline_s)
            self._awaited.remove(last)
            waiting = sum(isinstance(item, Publication) and item.number <= last for item in self._waiting)
            return waiting + sum(publication.number <= last for publication in self._sent.values())

    def _notify(self) -> None:
        """Notify waiting threads only if one of them can return: notifying on every acknowledgement is expensive."""
        if self._awaited and self._oldest() > min(self._awaited):
            self._changed.notify_all()

    def _oldest(self) -> float:
        first = [self._waiting[0]] if self._waiting else []
        for sent in (self._sent, self._unconfirmed):
            first.extend(itertools.islice(sent.values(), 1))
        return min((item.number for item in first), default=math.inf)
