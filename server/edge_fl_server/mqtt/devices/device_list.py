"""The devices of a fleet according to the broker: their retained states and capabilities, read without a server.

A restarted broker may retain the state of a device that has left since; only an online server detects this. The list therefore includes
whether a server is online, and from the local registry, if there is one, when a server last received a message of each device, its
outlier score, and whether its reports count. A state that its device did not sign is flagged. Of a device without a state that can be
read the list has the status of the registry, as the server, the dashboard and `fleet changes` have it, and says why.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec
from msgspec import Struct

from edge_fl.console.tables import Column, Columns, cell_text
from edge_fl.console.units import cut, cut_prose
from edge_fl.errors import InputError, ProtocolError, nearest
from edge_fl.failures import Failure
from edge_fl.fields import Tier
from edge_fl.fleet.remote_settings import DesiredSettings
from edge_fl.fleet.tags import Tags
from edge_fl.heads.wording import DeviceWords
from edge_fl.secure.signatures import Authorities, ForgedError, require_stated
from edge_fl.wire.messages import BOARD_NOTES, GONE, MESSAGES, DeviceState, ServerState
from edge_fl.wire.topics import Topics, checked
from edge_fl_server.mqtt.connector import LeaseLimits, ServerConnect, read_retained
from edge_fl_server.mqtt.device_packets import decode_cleaned
from edge_fl_server.mqtt.devices import remote_settings
from edge_fl_server.mqtt.devices.roster import RosterDevice, fold
from edge_fl_server.mqtt.statements import is_will, numbers_of
from edge_fl_server.registry import Database, fleets, registered_reports, registered_tags, rollouts
from edge_fl_server.registry.registered_devices import UNKNOWN, desired_settings, listed
from edge_fl_server.registry.tables import DeviceRecord, ReportRecord
from edge_fl_server.selectors import selected

LIMITS = LeaseLimits(connect_s=5.0, settle_s=1.0)


def _positive(value: float) -> str:
    """A number, "-" for 0 and None."""
    return cell_text(value or None)


COLUMNS: Columns = {
    "device": "device",
    "status": "status",
    "standing": "standing",
    "signed": Column("signed", rank=2),
    "score": Column("outlier score", _positive, rank=3),
    "tier": "tier",
    "head": Column("head", cut, prose=True),
    "configured": Column("configured head", cut, rank=4),
    "tags": Column("tags", rank=3),
    "samples": Column("samples", rank=4),
    "release": Column("release", _positive),
    "words": Column("accuracy", prose=True),
    "accuracy": Column("accuracy after"),
    "labels": Column("of"),
    "interval": Column("90 % interval"),
    "fleet": Column("fleet's head"),
    "agent": Column("agent", cut, rank=3),
    "agent_update": Column("agent update", cut, prose=True, rank=3),
    "settings": Column("remote settings", rank=3),
    "machine": Column("machine", cut, rank=5),
    "activity": Column("activity", rank=3),
    "why": Column("why", cut),
    "last_seen": Column("last seen, UTC", rank=2),
    "reason": Column("reason", cut_prose, prose=True),
    "measured": Column("measured", cut_prose, prose=True, rank=6),
}


SHOWN: Columns = {
    name: column
    for name, column in COLUMNS.items()
    if name not in ("accuracy", "labels", "interval", "fleet")  # which the words hold
}
"""The columns of the table; JSON has all."""


class DeviceList(NamedTuple):
    """One row per device, ascending, and whether a server is online."""

    online: bool
    rows: list[dict[str, object]]


def devices(
    connect: ServerConnect,
    fleet: str,
    db: Database,
    limits: LeaseLimits = LIMITS,
    *,
    where: str = "",
    sort: str = "device",
    authorities: Authorities = (),
) -> DeviceList:
    """Read the devices retained on the broker, and what the registry knows of them; add its blocked ones. Only those that `where` selects.

    Raises ConnectError, and InputError for a fleet that is neither in the registry nor on the broker, or an unknown column to `sort` by.
    With the CAs of the devices' certificates (`authorities`) the signatures on their states are checked.
    """
    columns = [name for name in COLUMNS if name != "words"]
    if sort not in columns:
        raise InputError(f"--sort {sort}: no column{nearest(sort, columns)}", "nothing was listed")
    topics = Topics(checked(fleet, "fleet"))
    chosen = set(selected(db, fleet, where)) if where else None
    registered = {record.device: record for record in listed(db, fleet)}
    removed = {device for device, record in registered.items() if record.removed}
    known = {
        id: RosterDevice(id) for id, record in registered.items() if record.blocked and not record.removed
    }
    signed: dict[str, str] = {}
    unreadable: dict[str, tuple[str]] = {}
    online = False
    patterns = [topics.server("state"), topics.up("+", "state"), topics.up("+", "meta")]
    retained = read_retained(connect, patterns, limits)
    if not retained and fleet not in (there := fleets.known(db)):
        raise InputError(f"no fleet {fleet!r} on this broker{nearest(fleet, there)}", "nothing was listed")
    for topic, payload in sorted(retained.items()):
        address = None
        try:
            address = topics.parse(topic)
            message = decode_cleaned(payload, MESSAGES[address.kind])
        except ProtocolError as error:  # such as that of a device with another protocol version
            if address and address.kind == "state" and address.device not in removed:
                known.setdefault(address.device, RosterDevice(address.device))
                unreadable[address.device] = (f"its state on the broker cannot be read ({error.message})",)
            continue
        if isinstance(message, ServerState):
            online = message.online
            continue
        if address.device in removed:
            continue  # the server clears its retained messages
        if authorities and address.kind == "state":
            signed[address.device] = _signed(address.device, fleet, payload, message, registered, authorities)
        device = fold(known.get(address.device, RosterDevice(address.device)), address.kind, message, 0.0)
        if device:
            known[address.device] = device
    tagged, measured, fitted = (
        registered_tags.of_devices(db, fleet),
        registered_reports.newest_measured(db, fleet),
        registered_reports.newest_heads(db, fleet),
    )
    desired, served = desired_settings(db, fleet), rollouts.served_release(db, fleet)
    rows = [
        _row(device, registered.get(id), tagged.get(id, {}), signed.get(id, ""))
        | {"settings": _settings(desired.get(id), device)}
        | _measured(full := device.tier is Tier.FULL, (measured if full else fitted).get(id))
        | {"reason": "; ".join((*unreadable.get(id, ()), *_reasons(device, registered.get(id), served)))}
        for id, device in sorted(known.items())
        if chosen is None or id in chosen
    ]
    return DeviceList(online, sorted(rows, key=lambda row: _order(row[sort])))


def _order(value: object) -> tuple[bool, float, list[tuple[int, str]]]:
    """Ascending, numbers in texts as numbers ("0.9.0" before "0.10.0"), cells without a value last."""
    if isinstance(value, int | float):
        return False, value, []
    parts = re.findall(r"\d+|\D+", str(value or ""))
    return not parts, 0.0, [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _reasons(device: RosterDevice, record: DeviceRecord | None, served: int) -> Iterator[str]:
    """Why a device needs attention, or its accuracy may be low or uncertain."""
    state, capability = device.state, device.capability
    if record and record.blocked:
        yield record.blocked_why
    if state and state.status in GONE:
        yield f"{state.status}: not connected"
    if state and state.why:
        word = Failure.of(state.why)
        yield f"{state.why}: {word.explanation}" if word and word.stated else state.why
    if record and record.outlier_score >= 1:
        yield "its newest update differs strongly from the others'"
    if capability and capability.drift:
        yield "its samples have changed since its head was fitted"
    if capability and capability.missed:
        yield f"{capability.missed:.0%} of its newest labels were outside their prediction sets: its promise is broken"
    if state and state.release and served and state.release != served:
        yield f"it serves release {state.release}, the fleet {served}"
    yield from capability.notes[BOARD_NOTES:] if capability else ()


def _measured(full: bool, report: ReportRecord | None) -> dict[str, object]:
    """What a device predicts with, and its accuracy, in words and as numbers."""
    head, found = DeviceWords.of_report(
        report.head if report else "",
        report.samples if report else 0,
        report.metrics if report else None,
        full=full,
    )
    return {
        "head": head,
        "words": found.words,
        "accuracy": found.accuracy,
        "labels": found.n,
        "interval": found.range,
        "fleet": found.fleet,
    }


def _settings(desired: DesiredSettings | None, device: RosterDevice) -> str:
    """Whether the operator's settings are in effect; "" without any."""
    if desired is None or not desired.values:
        return ""
    capability = msgspec.to_builtins(device.capability) if device.capability else None
    differing = remote_settings.differing(desired, capability)
    return (
        f"{len(differing)} of {len(desired.values)} not in effect" if differing else remote_settings.APPLIED
    )


def _signed(
    device: str,
    fleet: str,
    payload: bytes,
    message: Struct,
    registered: Mapping[str, DeviceRecord],
    authorities: Authorities,
) -> str:
    """Whether a device signed its retained state: "yes", "no", "" for its will, or why the state is not to be believed."""
    if not isinstance(message, DeviceState) or is_will(message):
        return ""
    numbers = numbers_of(registered[device]) if device in registered else {}
    if message.signature is None:
        return Failure.UNSIGNED if numbers else "no"
    try:
        require_stated("state", fleet, device, message.signature, payload, authorities)
    except ForgedError as error:
        return error.why
    return Failure.OUTDATED if message.signature.number < numbers.get("state", 0) else "yes"


def _row(device: RosterDevice, record: DeviceRecord | None, tags: Tags, signed: str) -> dict[str, object]:
    state, capability = device.state, device.capability
    update = capability.update if capability else None
    return {
        "device": device.id,
        "status": state.status if state else record.status if record else UNKNOWN,
        "standing": record.blocked if record else "",
        "signed": signed,
        "score": record.outlier_score if record else None,
        "tier": capability.tier if capability else "",
        "configured": capability.head if capability else "",
        "tags": " ".join(f"{key}={value}" for key, value in tags.items()),
        "samples": capability.samples if capability else 0,
        "release": state.release if state else 0,
        "agent": capability.agent if capability else "",
        "agent_update": f"{update.state}{f' ({update.why})' if update.why else ''}" if update else "",
        "machine": capability.machine if capability else "",
        "activity": state.activity if state else "",
        "why": state.why if state else "",
        "last_seen": record.seen_at[:19].replace("T", " ") if record else "",
        "measured": "; ".join(capability.notes[:BOARD_NOTES]) if capability else "",
    }
