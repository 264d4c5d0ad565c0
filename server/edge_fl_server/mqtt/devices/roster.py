"""The roster: every device of the fleet with its last state and capability.

`fold` is pure: the known device and one message give the updated device. `Roster` applies it to received messages, waits for devices and
notifies listeners of changes. A lost device stays in the table but is in no cohort.

Two machines may have one identity: a copied or stolen SD card. A broker allows one client per name and disconnects the older, which
reconnects and disconnects the other, and so on. Every agent process draws a random boot id, so boot ids that alternate come from two
running processes.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec
from msgspec import Struct
from msgspec.structs import replace as replace_fields

from edge_fl.errors import DeadlineError, shortened
from edge_fl.failures import Failure
from edge_fl.fields import Tier
from edge_fl.secure.signatures import certificate_end
from edge_fl.untrusted import converted
from edge_fl.wire.messages import GONE, PROTOCOL, Capability, DeviceState
from edge_fl_server.mqtt.connection import ReceivedMessage, ServerConnection
from edge_fl_server.registry.tables import DeviceRecord
from edge_fl_server.selectors import Selection

MAX_DEVICES = 100_000
ALTERNATIONS = 4  # a, b, a, b: a late message of an ended process gives at most three
DeviceId = str
POLL_S = 0.5
BATCH_S = 0.02  # to handle many simultaneous messages at once
AVAILABLE = frozenset({"ready", "alert"})  # "alert": an unresolved failure, but able to work


class DuplicateDetector:
    """The most recent boot ids of every device."""

    def __init__(self) -> None:
        self._boots: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def add(self, device: str, boot: str) -> tuple[str, str] | None:
        """Add the boot id of a message -> both boot ids if they alternate; detection then starts again."""
        boots = self._boots.get(device, ())
        if boots[-1:] == (boot,):
            return None
        boots = (*boots, boot)[-ALTERNATIONS:]
        alternate = len(boots) == ALTERNATIONS and len(set(boots)) == 2
        self._boots[device] = () if alternate else boots
        self._boots.move_to_end(device)
        if len(self._boots) > MAX_DEVICES:
            self._boots.popitem(last=False)
        return (boots[0], boots[1]) if alternate else None


@dataclass(frozen=True)
class RosterDevice:
    """A device: its last state and capability (None: not received yet), and when its last message arrived, on the monotonic clock."""

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
        """Whether it can take an assignment: present, with a known capability and the same major version of the protocol."""
        return (
            self.state is not None
            and self.state.status in AVAILABLE
            and self.capability is not None
            and self.capability.protocol.partition(".")[0] == PROTOCOL.partition(".")[0]
        )


Table = Mapping[DeviceId, RosterDevice]
ChangeListener = Callable[[RosterDevice | None, RosterDevice], None]  # (before, now)


def fold(
    before: RosterDevice, kind: str, message: Struct | bytes | None, now_s: float
) -> RosterDevice | None:
    """The device after a message of `kind` "state" or "meta"; None if its cleared state removes it."""
    match message:
        case DeviceState(status="lost", boot=boot) if before.state and before.boot != boot:
            return before  # late will of an older process
        case DeviceState():
            return replace(before, state=message, seen_s=now_s)
        case Capability():
            return replace(before, capability=message, seen_s=now_s)
        case None if kind == "state":
            return None
    return before


class Roster:
    """The devices of one fleet; created before the connection opens."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection, self._journal = connection, connection.journal
        self._devices: dict[DeviceId, RosterDevice] = {}
        self._change = threading.Condition()  # holds a re-entrant lock
        self._listeners: list[ChangeListener] = []
        self._duplicates = DuplicateDetector()
        self._trained: Selection | None = None
        for kind in ("state", "meta"):
            connection.on(kind, self._on_message)
        self._journal.on_removed = self._clear

    @property
    def table(self) -> Table:
        """A copy of all devices."""
        with self._change:
            return dict(self._devices)

    def get(self, id: DeviceId) -> RosterDevice | None:
        return self._devices.get(id)

    def samples(self, id: DeviceId) -> int:
        """The announced number of samples of a device, 0 if unknown."""
        device = self._devices.get(id)
        return device.capability.samples if device and device.capability else 0

    def train_only(self, selection: Selection) -> None:
        """Limit the devices that train to a selection."""
        self._trained = selection if selection.text else None

    def full_devices(self) -> list[DeviceId]:
        """Ready devices that can train, ascending, without blocked ones and those that the run does not select."""
        ready = self._ready(Tier.FULL)
        return ready if self._trained is None else [id for id in ready if id in self._trained]

    def head_devices(self) -> list[DeviceId]:
        """Ready head-only devices, ascending, without blocked ones."""
        return self._ready(Tier.HEAD)

    def _ready(self, tier: Tier) -> list[DeviceId]:
        ready = (id for id, device in self.table.items() if device.ready and device.tier is tier)
        return sorted(id for id in ready if not self._journal.blocked(id))

    def gone_for(self, id: DeviceId) -> float:
        """Seconds since a device left; 0 while it is present."""
        device = self._devices.get(id)
        if device is None:
            return float("inf")
        return time.monotonic() - device.seen_s if device.gone else 0.0

    def on_change(self, listener: ChangeListener) -> None:
        """Call `listener` on the receive thread when the state or capability of a device changes."""
        self._listeners.append(listener)

    def wait_for(self, *, full: int = 0, heads: int = 0, deadline_s: float) -> None:
        """Wait until enough devices are ready. Raises DeadlineError, which names the known devices."""
        until = time.monotonic() + deadline_s
        with self._change:
            while len(self.full_devices()) < full or len(self.head_devices()) < heads:
                self._connection.check()
                if (left := until - time.monotonic()) <= 0:
                    limit = f" (full ones of {self._trained.text!r})" if self._trained else ""
                    raise DeadlineError(
                        f"fleet {self._connection.topics.fleet!r}: {len(self.full_devices())} full and {len(self.head_devices())} head-only"
                        f" devices{limit} after {deadline_s:g} s, expected {full} and {heads}; known: {self._summary()}",
                        consequence="the run stops",
                    )
                self._change.wait(min(left, POLL_S))
                self._change.wait_for(lambda: False, BATCH_S)

    def _summary(self) -> str:
        """The known devices; first those that are online and do not count, with why."""
        blocked = self._journal.blocked
        devices = sorted(
            self._devices.items(), key=lambda item: (not (item[1].ready and blocked(item[0])), item[0])
        )
        known = [f"{id} ({', '.join(filter(None, (_description(it), blocked(id))))})" for id, it in devices]
        return shortened(known, 8) or "none"

    def _on_message(self, received: ReceivedMessage) -> None:
        id, message = received.address.device, received.message
        if self._journal.blocked(id) == "removed":
            if message is not None:
                self._clear(id)
            return
        with self._change:
            before = self._devices.get(id)
            now = fold(before or RosterDevice(id), received.address.kind, message, time.monotonic())
            if now is None:
                self._devices.pop(id, None)
            elif before or len(self._devices) < MAX_DEVICES:
                self._devices[id] = now
            self._change.notify_all()
            count = len(self._devices)
        self._connection.spread_returns(count)
        if received.retained and isinstance(message, DeviceState) and message.status not in GONE:
            self._connection.request_rebirth(id)
        if isinstance(message, DeviceState) and message.status != "lost":
            self._detect_duplicates(id, message.boot)
        if before and isinstance(message, DeviceState) and _has_restarted(before, message):
            self._journal.record_restart(id, message.boot)
        if now is not None and now is not before:
            numbers = self._connection.statements.numbers(id)
            self._journal.record_device(_record(self._connection.topics.fleet, now, numbers))
            for listener in self._listeners:
                listener(before, now)

    def _clear(self, id: DeviceId) -> None:
        """Forget a device that was decommissioned or renamed, and clear its retained messages."""
        with self._change:
            self._devices.pop(id, None)
        topics = self._connection.topics
        for topic in (
            topics.up(id, "state"),
            topics.up(id, "meta"),
            topics.down(id, "assignment"),
            topics.down(id, "settings"),
        ):
            self._connection.clear_retained(topic)

    def _detect_duplicates(self, id: DeviceId, boot: str) -> None:
        if boots := self._duplicates.add(id, boot):
            self._journal.quarantine(
                id,
                f"two machines have its identity (boots {boots[0]} and {boots[1]} alternate): stop one, or revoke its certificate"
                f" ('edge-fl fleet revoke {id}') and enrol your own machine again",
            )


def _has_restarted(before: RosterDevice, state: DeviceState) -> bool:
    """Whether another process of the agent says its state, and the one before did not end as planned.

    A server that has just started knows no process before.
    """
    planned = before.state is None or before.state.why == Failure.SHUT_DOWN
    return state.status != "lost" and not planned and before.boot != state.boot


def _record(fleet: str, device: RosterDevice, numbers: Mapping[str, int]) -> DeviceRecord:
    state = device.state or DeviceState("init", "none")
    capability = device.capability
    if capability and capability.signature and numbers.get("meta"):  # it was checked
        capability = replace_fields(capability, certificate_until=certificate_end(capability.signature))
    capability = replace_fields(capability, signature=None) if capability else None
    added = {"fleet": fleet, "device": device.id, "capability": msgspec.to_builtins(capability)}
    added |= {f"signed_{kind}": number for kind, number in numbers.items() if kind != "rpt"}
    return converted(msgspec.to_builtins(state) | added, DeviceRecord)


def _description(device: RosterDevice) -> str:
    return f"{device.capability.tier if device.capability else 'unknown'}, {device.state.status if device.state else 'no state'}"
