"""The devices of a fleet as the broker knows them: their retained states and capabilities, read without a server."""

from __future__ import annotations

from edge_fl.errors import ProtocolError
from edge_fl.wire.messages import MESSAGES, decode
from edge_fl.wire.topics import Topics, checked
from server.wire.link import Connect, Limits, read_retained
from server.wire.roster import Device, fold

LIMITS = Limits(connect_s=5.0, settle_s=1.0)
COLUMNS = {
    "device": "device",
    "status": "status",
    "tier": "tier",
    "head": "head",
    "samples": "samples",
    "release": "release",
    "machine": "machine",
    "activity": "activity",
    "why": "why",
    "measured": "measured",
}


def devices(connect: Connect, fleet: str, limits: Limits = LIMITS) -> list[dict[str, object]]:
    """One row per device, ascending. Raises ConnectError."""
    topics = Topics(checked(fleet, "fleet"))
    known: dict[str, Device] = {}
    for topic, payload in sorted(
        read_retained(connect, [topics.state("+"), topics.meta("+")], limits).items()
    ):
        try:
            address = topics.parse(topic)
            message = decode(payload, MESSAGES[address.kind])
        except ProtocolError:
            continue  # a device that speaks another protocol is no row that could be filled
        device = fold(known.get(address.device, Device(address.device)), address.kind, message, 0.0)
        if device:
            known[address.device] = device
    return [_row(device) for device in known.values()]


def _row(device: Device) -> dict[str, object]:
    state, capability = device.state, device.capability
    return {
        "device": device.id,
        "status": state.status if state else "silent",
        "tier": capability.tier if capability else "",
        "head": capability.head if capability else "",
        "samples": capability.samples if capability else 0,
        "release": state.release if state else 0,
        "machine": capability.machine if capability else "",
        "activity": state.activity if state else "",
        "why": state.why if state else "",
        "measured": "; ".join(capability.notes) if capability else "",
    }
