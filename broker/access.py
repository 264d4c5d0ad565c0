"""Tries a broker's access list out, whoever wrote it: what a device may say and hear, what it may not, and who gets in at all.

A subscription may be granted and never served, and a publication may be taken and dropped, so only what arrives counts. Two devices are
tried that exist for the length of the check.
"""

from __future__ import annotations

from dataclasses import replace

from broker.check import Finding, Party, Probe, probing
from edge_fl.errors import ConnectError, DeadlineError
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet

REFUSED_S = 2.0  # a broker that refuses says so at once


def check_access(
    operator: Party, device: Party, other: Party, fleet: str, deadline_s: float = 10.0
) -> list[Finding]:
    """What the broker lets `device` do, beside what it should. Raises ConnectError when one of the three does not get in."""
    topics = Topics(fleet)
    with (
        probing(operator, deadline_s) as above,
        probing(device, deadline_s) as below,
        probing(other, deadline_s),
    ):
        written = _written(above, below, topics, device.name, other.name)
        heard = _heard(above, below, topics, device.name, other.name)
    return [
        _finding("a device writes", written, {"own up"}),
        _finding("a device hears", heard, {"own dn", "tuf"}),
        _closed(
            "without a certificate", replace(device, endpoint=replace(device.endpoint, cert=None, key=None))
        ),
        _closed(
            "in plaintext", replace(device, endpoint=replace(device.endpoint, ca=None, cert=None, key=None))
        ),
    ]


def _written(above: Probe, below: Probe, topics: Topics, device: str, other: str) -> set[str]:
    """Which families reach others when the device publishes on them."""
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
        above.client.subscribe(topic)
    _settle(above, topics.assignment(device))
    for topic in (*tried.values(), last):
        below.client.publish(Packet(topic, b"", expiry_s=5))
    came = _until(above, last)
    return {family for family, topic in tried.items() if topic in came}


def _heard(above: Probe, below: Probe, topics: Topics, device: str, other: str) -> set[str]:
    """Which families reach the device when it subscribes to everything."""
    tried = {
        "another's dn": topics.command(other),
        "another's up": topics.log(other),
        "tuf": topics.tuf("999999999.root.json"),
        "own dn": topics.command(device),
    }
    last = topics.ack(device)
    for pattern in ("#", f"{topics.root}/#", *tried.values(), last):
        below.client.subscribe(pattern)
    _settle(below, topics.state(device))
    for topic in (*tried.values(), last):
        above.client.publish(Packet(topic, b"", expiry_s=5))
    came = _until(below, last)
    return {family for family, topic in tried.items() if topic in came}


def _settle(probe: Probe, topic: str) -> None:
    """A broker answers in order: once it has taken what we may publish, our subscriptions stand."""
    probe.client.publish(Packet(topic, b"", expiry_s=1))
    probe.client.drain(probe.deadline_s)


def _until(probe: Probe, last: str) -> set[str]:
    """The topics that arrive before the one that was published last."""
    came: set[str] = set()
    try:
        while (packet := probe.packet()).topic != last:
            came.add(packet.topic)
    except DeadlineError:
        came.add("nothing at all")
    return came


def _finding(what: str, found: set[str], needed: set[str]) -> Finding:
    return Finding(what, ", ".join(sorted(found)) or "nothing", ", ".join(sorted(needed)), found == needed)


def _closed(what: str, party: Party) -> Finding:
    try:
        with probing(party, REFUSED_S):
            return Finding(what, "let in", "refused", ok=False)
    except ConnectError:
        return Finding(what, "refused", "refused", ok=True)
