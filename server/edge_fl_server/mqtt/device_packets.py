"""Packets of devices before the server uses them: their rate is limited, their text made safe to show, and malformed ones are counted.

A correct device stays far below the limit: it sends a few messages per request, and one update of at most 512 MiB in ten seconds. A blocked
one, whose reports do not count, gets a tenth: enough for its states, too little to keep the server busy.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import asdict, replace

from edge_fl.blob import CHUNK_BYTES, MAX_BLOB_BYTES
from edge_fl.errors import ProtocolError
from edge_fl.logs import LogLimit
from edge_fl.wire.messages import decode
from edge_fl.wire.topics import NAME, Topics, role_of
from edge_fl.wire.transport import Packet

M = TypeVar("M", bound=Struct)
log = logging.getLogger(__name__)
MAX_KEY = 80  # characters
MAX_KEYS = 10_000  # a client may invent names without end: packets beyond this number are counted together
OTHERS = "others"
INTERVAL_S = 10.0
MAX_MESSAGES = 3000  # per device and interval, without chunks
MAX_CHUNK_BYTES = 2 * MAX_BLOB_BYTES  # per device and interval; smaller chunks count as one of the usual size
BLOCKED_SHARE = 10  # a blocked device has 1 / BLOCKED_SHARE of both
OnExcess = Callable[[str, int, str], None]
"""(device, number of dropped messages, description), once per interval and device; must not wait."""
IsBlocked = Callable[[str], object]
"""Whether the reports of a device do not count; called for every message, so it must be quick."""


def one_line(text: str) -> str:
    """The text with a space for each control character, line break or invisible formatting character."""
    return "".join(char if char.isprintable() else " " for char in text)


def decode_cleaned(payload: bytes, kind: type[M]) -> M:
    """Decode a device's message, its texts as `one_line`. Raises ProtocolError."""
    cleaned: M = _cleaned(decode(payload, kind))
    return cleaned


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return one_line(value)
    if isinstance(value, Struct):
        return replace(value, **{name: _cleaned(item) for name, item in asdict(value).items()})
    if isinstance(value, dict):
        return {key: _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value


class MalformedPackets(Counter[str]):
    """The number of packets by "DEVICE KIND"; one thread adds."""

    def add(self, sender: str, topic: str, error: ProtocolError, lines: LogLimit) -> None:
        """Count a packet; log the 1st, the 10th, the 100th ... of its sender and kind."""
        key = f"{sender} {kind_of(topic)}".rstrip()[:MAX_KEY]
        if key not in self and len(self) >= MAX_KEYS:
            key = OTHERS
        self[key] += 1
        if str(self[key]).rstrip("0") == "1":
            count = f" ({self[key]:,} malformed messages of this kind)" if self[key] > 1 else ""
            text, found = "%s: %s%s", (one_line(topic), one_line(str(error)), count)
            lines.write(log, logging.WARNING, one_line(sender), text, *found)


def kind_of(topic: str) -> str:
    """The kind of a device's message, from efl/1/FLEET/d/DEVICE/up/KIND; "" if the topic has none."""
    return "".join(topic.split("/")[6:7])


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
