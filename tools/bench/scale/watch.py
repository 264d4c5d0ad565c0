"""Measurements from outside a running fleet: memory of processes, the broker's counters, delays of reports."""

import os
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec

from edge_fl.wire.messages import Report, Round, decode
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Event, Packet

FLEET = "main"
COUNTED = {"received": "$SYS/broker/publish/messages/received", "sent": "$SYS/broker/publish/messages/sent"}
COUNTED |= {"dropped": "$SYS/broker/publish/messages/dropped"}


@dataclass
class Watch:
    """Measurements: peak memory of each process in bytes, the broker's counters, delays of reports by round and device."""

    memory: dict[str, int] = field(default_factory=dict)
    counted: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    begun_s: dict[int, float] = field(default_factory=dict)
    late_s: dict[int, dict[str, float]] = field(default_factory=dict)
    heads: set[str] = field(default_factory=set)
    released: bool = False

    def record(self, event: Event) -> None:
        """Record a message of the broker."""
        if not isinstance(event, Packet) or not event.payload:
            return
        now_s = time.monotonic()
        if event.topic.startswith("$SYS"):
            self.counted.setdefault(event.topic, []).append((now_s, int(event.payload)))
            return
        address = Topics(FLEET).parse(event.topic)
        if address.kind == "tuf":
            signed = msgspec.json.decode(event.payload)["signed"]
            self.released = signed["meta"]["snapshot.json"]["version"] > 1  # 1: nothing is released yet
        elif address.kind == "round":
            self.begun_s.setdefault(decode(event.payload, Round).round, now_s)
        elif address.kind == "rpt" and decode(event.payload, Report).kind == "head":
            self.heads.add(address.device)
        elif address.kind == "rpt" and decode(event.payload, Report).kind == "update":
            number = int(address.path[1])
            late_s = now_s - self.begun_s.get(number, now_s)
            self.late_s.setdefault(number, {}).setdefault(address.device, late_s)

    def measure(self, **processes: int) -> None:
        """Update the peak memory of processes."""
        for name, pid in processes.items():
            self.memory[name] = max(self.memory.get(name, 0), resident_bytes(pid))

    def messages(self, name: str) -> tuple[int, float]:
        """Publications counted by the broker: total, and per second in the busiest interval. A restart resets its counters."""
        points = self.counted.get(COUNTED[name], [])
        steps = [
            (after - before if after >= before else after, max(to_s - from_s, 0.001))
            for (from_s, before), (to_s, after) in pairwise(points)
        ]
        return sum(count for count, _ in steps), max((count / s for count, s in steps if s > 1), default=0.0)


def mosquitto_of(parent: int) -> int:
    """Process id of the mosquitto run by a `broker up`; 0 if there is none."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = stat.read_text().partition(" ")
        except OSError:
            continue
        if rest.startswith("(mosquitto)") and int(rest.rpartition(")")[2].split()[1]) in _family(parent):
            return int(pid)
    return 0


def _family(parent: int) -> set[int]:
    try:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except OSError:
        children = []
    return {parent, *map(int, children)}


def processor_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if it does not exist."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
