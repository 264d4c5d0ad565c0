"""Check the access list of any broker: what a device may publish and receive, and who may connect.

Only arriving messages count: a broker may grant a subscription and never serve it, or acknowledge a publication and drop it. The check uses
two temporary devices.
"""

from __future__ import annotations

from dataclasses import replace

from edge_fl.errors import ConnectError, DeadlineError
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet
from edge_fl_broker.check import CheckResult, Party, Probe, probing

REFUSED_S = 2.0  # a broker rejects a connection at once


def check_access(
    operator: Party, device: Party, other: Party, fleet: str, deadline_s: float = 10.0
) -> list[CheckResult]:
    """Check what `device` may publish and receive, and connections without a certificate.

    Raises ConnectError if one of the three cannot connect.
    """
    topics = Topics(fleet)
    with (
        probing(operator, deadline_s) as operator_probe,
        probing(device, deadline_s) as device_probe,
        probing(other, deadline_s),
    ):
        published = _published(operator_probe, device_probe, topics, device.name, other.name)
        received = _received(operator_probe, device_probe, topics, device.name, other.name)
    return [
        _result("device publishes on", published, {"own up"}),
        _result("device receives", received, {"own dn", "tuf"}),
        _closed(
            "without a certificate", replace(device, endpoint=replace(device.endpoint, cert=None, key=None))
        ),
        _closed(
            "in plaintext", replace(device, endpoint=replace(device.endpoint, ca=None, cert=None, key=None))
        ),
    ]


def _published(
    operator_probe: Probe, device_probe: Probe, topics: Topics, device: str, other: str
) -> set[str]:
    """Families of topics on which the device's publications reach others."""
    tried = {
        "own up": topics.log(device),
        "another's up": topics.log(other),
        "own dn": topics.command(device),
        "another's dn": topics.command(other),
        "tuf": topics.tuf("999999999.root.json"),
        "art": topics.chunk("0" * 64, 0),
        "round": topics.round("check"),
        "another's claim": topics.enrol_response(other),
    }
    last = topics.request(device)
    for topic in (*tried.values(), last):
        operator_probe.client.subscribe(topic)
    _settle(operator_probe, topics.assignment(device))
    for topic in (*tried.values(), last):
        device_probe.client.publish(Packet(topic, b"", expiry_s=5))
    arrived = _topics_until(operator_probe, last)
    return {family for family, topic in tried.items() if topic in arrived}


def _received(
    operator_probe: Probe, device_probe: Probe, topics: Topics, device: str, other: str
) -> set[str]:
    """Families of topics that the device receives when it subscribes to everything."""
    tried = {
        "another's dn": topics.command(other),
        "another's up": topics.log(other),
        "tuf": topics.tuf("999999999.root.json"),
        "own dn": topics.command(device),
    }
    last = topics.ack(device)
    for pattern in ("#", f"{topics.root}/#", *tried.values(), last):
        device_probe.client.subscribe(pattern)
    _settle(device_probe, topics.state(device))
    for topic in (*tried.values(), last):
        operator_probe.client.publish(Packet(topic, b"", expiry_s=5))
    arrived = _topics_until(device_probe, last)
    return {family for family, topic in tried.items() if topic in arrived}


def _settle(probe: Probe, topic: str) -> None:
    """Wait until subscriptions are active: brokers process packets in order, so an acknowledged publication follows them."""
    probe.client.publish(Packet(topic, b"", expiry_s=1))
    probe.client.drain(probe.deadline_s)


def _topics_until(probe: Probe, last: str) -> set[str]:
    """Topics of the packets that arrive before the one published last."""
    topics: set[str] = set()
    try:
        while (packet := probe.packet()).topic != last:
            topics.add(packet.topic)
    except DeadlineError:
        topics.add("timeout")
    return topics


def _result(what: str, found: set[str], needed: set[str]) -> CheckResult:
    return CheckResult(
        what, ", ".join(sorted(found)) or "nothing", ", ".join(sorted(needed)), found == needed
    )


def _closed(what: str, party: Party) -> CheckResult:
    try:
        with probing(party, REFUSED_S):
            return CheckResult(what, "accepted", "rejected", ok=False)
    except ConnectError:
        return CheckResult(what, "rejected", "rejected", ok=True)
