"""Who is there: every device of the fleet with its last state and capability, folded from what devices say about themselves.

`fold` is pure: what was known of a device and one message give what is known now. `Roster` feeds it from the link, lets others wait for
devices, and tells them of changes. A device that is lost stays in the table but is in no cohort.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec
from msgspec import Struct

from edge_fl.capability import Tier
from edge_fl.errors import DeadlineError
from edge_fl.wire.messages import GONE, PROTOCOL, Capability, DeviceState
from server.mqtt.connection import Heard, ServerConnection
from server.mqtt.devices.clones import Clones
from server.mqtt.journal import Journal
from server.registry.records import DeviceRecord

DeviceId = str
POLL_S = 0.5
LOOK_S = 0.02
MAX_DEVICES = 100_000

# an alert names a failure that still stands; the device can do the next thing all the same
AT_WORK = frozenset({"ready", "alert"})


@dataclass(frozen=True)
class Device:
    """One device: its state and capability as last said (None: not yet), and when it spoke last, on the monotonic clock."""

    id: DeviceId
    state: DeviceState | None = None
    capability: Capability | None = None
    seen_s: float = 0.0

    @property
    def tier(self) -> Tier | None:
        return Tier(self.capability.tier) if self.capability else None

    @property
    def boot(self) -> str:
        return self.state.boot if self.state else ""

    @property
    def gone(self) -> bool:
        return self.state is None or self.state.status in GONE

    @property
    def ready(self) -> bool:
        """Whether it can be asked to work: there, known, and of our protocol."""
        return (
            self.state is not None
            and self.state.status in AT_WORK
            and self.capability is not None
            and self.capability.protocol.partition(".")[0] == PROTOCOL.partition(".")[0]
        )


Table = Mapping[DeviceId, Device]
Changed = Callable[[Device | None, Device], None]  # (before, now)


def fold(before: Device, kind: str, message: Struct | bytes | None, now_s: float) -> Device | None:
    """The device after a message of `kind` "state" or "meta"; None when its empty retained state retires it."""
    match message:
        case DeviceState(status="lost", boot=boot) if before.state and before.boot != boot:
            return before  # the will of an older boot, delivered late
        case DeviceState():
            return replace(before, state=message, seen_s=now_s)
        case Capability():
            return replace(before, capability=message, seen_s=now_s)
        case None if kind == "state":
            return None
    return before


def of_tier(devices: Iterable[Device], tier: Tier) -> list[DeviceId]:
    """The ready devices of one tier, ascending."""
    return sorted(device.id for device in devices if device.ready and device.tier is tier)


class Roster:
    """The table of one fleet as it changes; made before the link opens."""

    def __init__(self, connection: ServerConnection, journal: Journal | None = None) -> None:
        self._connection = connection
        self._journal = journal or Journal(fleet=connection.topics.fleet)
        self._devices: dict[DeviceId, Device] = {}
        self._change = threading.Condition()  # holds a re-entrant lock
        self._listeners: list[Changed] = []
        self._clones = Clones()
        for kind in ("state", "meta"):
            connection.on(kind, self._hear)

    @property
    def table(self) -> Table:
        """Every device as it is now."""
        with self._change:
            return dict(self._devices)

    def get(self, id: DeviceId) -> Device | None:
        """One device as it is now."""
        return self._devices.get(id)

    def full_devices(self) -> list[DeviceId]:
        """Devices that can train, ascending, without those whose reports do not count."""
        return self._in_good_standing(Tier.FULL)

    def head_devices(self) -> list[DeviceId]:
        """Devices that fit heads, ascending, without those whose reports do not count."""
        return self._in_good_standing(Tier.HEAD)

    def _in_good_standing(self, tier: Tier) -> list[DeviceId]:
        return [id for id in of_tier(self.table.values(), tier) if not self._journal.barred(id)]

    def gone_for(self, id: DeviceId) -> float:
        """Seconds since a device left; 0 while it is there."""
        device = self._devices.get(id)
        if device is None:
            return float("inf")
        return time.monotonic() - device.seen_s if device.gone else 0.0

    def on_change(self, listener: Changed) -> None:
        """Calls `listener` on the receive thread whenever a device says something new about itself."""
        self._listeners.append(listener)

    def wait_for(self, *, full: int = 0, heads: int = 0, deadline_s: float) -> None:
        """Waits until so many devices are ready. Raises DeadlineError that says who is there."""
        until = time.monotonic() + deadline_s
        with self._change:
            while len(self.full_devices()) < full or len(self.head_devices()) < heads:
                self._connection.check()
                if (left := until - time.monotonic()) <= 0:
                    raise DeadlineError(
                        f"fleet {self._connection.topics.fleet!r}: {len(self.full_devices())} full and {len(self.head_devices())} head-only"
                        f" devices after {deadline_s:g} s, expected {full} and {heads}; there are {self._who()}; the run stops"
                    )
                self._change.wait(min(left, POLL_S))
                # thousands of devices speak at once: look at them once
                self._change.wait_for(lambda: False, LOOK_S)

    def _who(self) -> str:
        there = [f"{id} ({_word(device)})" for id, device in sorted(self._devices.items())]
        return ", ".join(there[:8]) + (f" and {len(there) - 8} more" if len(there) > 8 else "") or "none"

    def _hear(self, heard: Heard) -> None:
        id, message = heard.address.device, heard.message
        with self._change:
            before = self._devices.get(id)
            now = fold(before or Device(id), heard.address.kind, message, time.monotonic())
            if now is None:
                self._devices.pop(id, None)
            elif before or len(self._devices) < MAX_DEVICES:
                self._devices[id] = now
            self._change.notify_all()
            count = len(self._devices)
        self._connection.expect(count)
        if heard.retained and isinstance(message, DeviceState) and message.status not in GONE:
            self._connection.ask_rebirth(id)
        if isinstance(message, DeviceState) and message.status != "lost":
            self._look_for_clones(id, message.boot)
        if now is not None and now is not before:
            self._journal.heard(_record(self._connection.topics.fleet, now))
            for listener in self._listeners:
                listener(before, now)

    def _look_for_clones(self, id: DeviceId, boot: str) -> None:
        if boots := self._clones.heard(id, boot):
            self._journal.quarantine(
                id,
                f"two machines have its identity (boots {boots[0]} and {boots[1]} take turns): revoke it ('edge-fl fleet revoke {id}')"
                " and enrol the one that is yours again",
            )


def _record(fleet: str, device: Device) -> DeviceRecord:
    state = device.state or DeviceState("init", "none")
    capability = msgspec.to_builtins(device.capability) if device.capability else None
    return DeviceRecord(
        fleet, device.id, state.status, state.activity, state.release, state.why, state.boot, capability
    )


def _word(device: Device) -> str:
    return f"{device.capability.tier if device.capability else 'unknown'}, {device.state.status if device.state else 'silent'}"
