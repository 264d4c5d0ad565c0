"""The devices of a fleet as the broker knows them: their retained states and capabilities, read without a server.

A broker that was started anew may retain the word of a device that has left meanwhile, and while no server listens nobody asks. So it is
said whether one is online, and of each device when a server last heard of it, as far as there is a registry here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from edge_fl.errors import ProtocolError
from edge_fl.wire.messages import MESSAGES, ServerState, decode
from edge_fl.wire.topics import Topics, checked
from server.mqtt.devices.roster import Device, fold
from server.mqtt.retained import Connect, Limits, read_retained

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
    "heard": "heard, UTC",
    "measured": "measured",
}


class DeviceList(NamedTuple):
    """One row per device, ascending, and whether a server is online that hears what they say."""

    online: bool
    rows: list[dict[str, object]]


def devices(
    connect: Connect, fleet: str, heard: Mapping[str, str] = {}, limits: Limits = LIMITS
) -> DeviceList:
    """What the broker retains; `heard` says when a server last heard of a device. Raises ConnectError."""
    topics = Topics(checked(fleet, "fleet"))
    known: dict[str, Device] = {}
    online = False
    patterns = [topics.server_state(), topics.state("+"), topics.meta("+")]
    for topic, payload in sorted(read_retained(connect, patterns, limits).items()):
        try:
            address = topics.parse(topic)
            message = decode(payload, MESSAGES[address.kind])
        except ProtocolError:
            continue  # a device that speaks another protocol is no row that could be filled
        if isinstance(message, ServerState):
            online = message.online
            continue
        device = fold(known.get(address.device, Device(address.device)), address.kind, message, 0.0)
        if device:
            known[address.device] = device
    return DeviceList(online, [_row(device, heard.get(device.id, "")) for device in known.values()])


def _row(device: Device, heard: str) -> dict[str, object]:
    state, capability = device.state, device.capability
    return {
        "device": device.id,
        "status": state.status if state else "unknown",
        "tier": capability.tier if capability else "",
        "head": capability.head if capability else "",
        "samples": capability.samples if capability else 0,
        "release": state.release if state else 0,
        "machine": capability.machine if capability else "",
        "activity": state.activity if state else "",
        "why": state.why if state else "",
        "heard": heard[:19].replace("T", " "),
        "measured": "; ".join(capability.notes) if capability else "",
    }
