"""Rate limit per device: messages above it are dropped before the server queues or decodes them.

A correct device stays far below: it sends a few messages per request, and one update of at most 512 MiB in ten seconds. A blocked one,
whose reports do not count, gets a tenth: enough for its states, too little to keep the server busy.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from edge_fl.blob import CHUNK_BYTES, MAX_BLOB_BYTES
from edge_fl.wire.topics import NAME, Topics, role_of
from edge_fl.wire.transport import Packet

INTERVAL_S = 10.0
MAX_MESSAGES = 3000  # per device and interval, without chunks
MAX_CHUNK_BYTES = 2 * MAX_BLOB_BYTES  # per device and interval; smaller chunks count as one of the usual size
BLOCKED_SHARE = 10  # a blocked device has 1 / BLOCKED_SHARE of both

OnExcess = Callable[[str, int, str], None]
"""(device, number of dropped messages, description), once per interval and device; must not wait."""
IsBlocked = Callable[[str], object]
"""Whether the reports of a device do not count; called for every message, so it must be quick."""


@dataclass(slots=True)
class _Usage:
    messages: int = 0
    chunk_bytes: int = 0
    dropped: int = 0


class RateLimit:
    """Count the messages of each device. One thread calls it."""

    def __init__(
        self,
        topics: Topics,
        on_excess: OnExcess,
        is_blocked: IsBlocked,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefix = f"{topics.root}/d/"
        self._on_excess, self._is_blocked, self._clock = on_excess, is_blocked, clock
        self._usage: dict[str, _Usage] = {}
        self._until = 0.0  # the first message begins the first interval

    def admits(self, packet: Packet) -> bool:
        """Count a message; False if it is above the limit of its device."""
        if self._clock() >= self._until:
            self._end_interval()
        if not packet.topic.startswith(self._prefix):
            return True
        device, _, rest = packet.topic[len(self._prefix) :].partition("/")
        if (usage := self._usage.get(device)) is None:
            usage = self._usage[device] = _Usage()
        if rest.startswith("up/blob/"):
            usage.chunk_bytes += max(len(packet.payload), CHUNK_BYTES)
        else:
            usage.messages += 1
        messages, chunk_bytes = self._limits(device)
        if usage.messages <= messages and usage.chunk_bytes <= chunk_bytes:
            return True
        usage.dropped += 1
        return False

    def _limits(self, device: str) -> tuple[int, int]:
        """How many messages a device may send in an interval, and how many bytes of chunks."""
        share = BLOCKED_SHARE if self._is_blocked(device) else 1
        return MAX_MESSAGES // share, MAX_CHUNK_BYTES // share

    def _end_interval(self) -> None:
        ended, self._usage = self._usage, {}
        self._until = self._clock() + INTERVAL_S
        for device, usage in ended.items():
            if usage.dropped and NAME.match(device) and role_of(device) == "device":
                messages, chunk_bytes = self._limits(device)
                self._on_excess(
                    device,
                    usage.dropped,
                    f"{usage.messages:,} messages and {usage.chunk_bytes >> 20:,} MiB of chunks in {INTERVAL_S:g} s,"
                    f" at most {messages:,} and {chunk_bytes >> 20:,} MiB; {usage.dropped:,} dropped",
                )
