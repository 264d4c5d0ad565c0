"""Check the access list of any broker: what a device may publish and receive, and who may connect.

Only arriving messages count: a broker may grant a subscription and never serve it, or acknowledge a publication and drop it. The check uses
two temporary devices.
"""

import secrets
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from edge_fl.errors import ConnectError, DeadlineError
from edge_fl.wire import identity
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet
from edge_fl_broker.check import BrokerCheck, Party, Probe, check, probing
from edge_fl_broker.provision import register_sync
from edge_fl_broker.provision.authority import FOLDERS, Authority

REFUSED_S = 2.0  # a broker rejects a connection at once
LIFE = timedelta(minutes=10)  # of the temporary devices


def full_check(home: Path, endpoint: Endpoint, fleet: str, deadline_s: float) -> list[BrokerCheck]:
    """Run `check` and `check_access`. Raises ConfigError without a CA, ConnectError when a client cannot connect."""
    register_sync.require(home)
    authority = Authority.open(home)
    operator = identity.read(home / FOLDERS["operator"])
    with tempfile.TemporaryDirectory() as folder:
        names = [f"check-{secrets.token_hex(4)}" for _ in range(2)]
        devices = authority.bake({name: Path(folder, name) for name in names}, LIFE)
        operator_party, device, other = (
            Party(client.name, client.endpoint(endpoint.host, endpoint.port))
            for client in (operator, *devices)
        )
        return [
            *check(operator_party, device, fleet, deadline_s),
            *check_access(operator_party, device, other, fleet, deadline_s),
        ]


def check_access(
    operator: Party, device: Party, other: Party, fleet: str, deadline_s: float = 10.0
) -> list[BrokerCheck]:
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


def _published(operator: Probe, device: Probe, topics: Topics, name: str, other: str) -> set[str]:
    """Families of topics on which the publications of the device `name` reach others."""
    tried = {
        "own up": topics.log(name),
        "another's up": topics.log(other),
        "own dn": topics.command(name),
        "another's dn": topics.command(other),
        "tuf": topics.tuf("999999999.root.json"),
        "art": topics.chunk("0" * 64, 0),
        "round": topics.round("check"),
        "another's claim": topics.enrol_response(other),
    }
    last = topics.request(name)
    return _arriving(device, operator, tried, last, tried.values(), topics.assignment(name))


def _received(operator: Probe, device: Probe, topics: Topics, name: str, other: str) -> set[str]:
    """Families of topics that the device `name` receives when it subscribes to everything."""
    tried = {
        "another's dn": topics.command(other),
        "another's up": topics.log(other),
        "tuf": topics.tuf("999999999.root.json"),
        "own dn": topics.command(name),
    }
    patterns = ("#", f"{topics.root}/#", *tried.values())
    return _arriving(operator, device, tried, topics.ack(name), patterns, topics.state(name))


def _arriving(
    sender: Probe,
    listener: Probe,
    tried: Mapping[str, str],
    last: str,
    patterns: Iterable[str],
    listeners_topic: str,
) -> set[str]:
    """Families of `tried` that reach the listener, which subscribes to `patterns`; the permitted topic `last` ends the test.

    Brokers process packets in order: once a publication to `listeners_topic` is acknowledged, the subscriptions are active.
    """
    for pattern in (*patterns, last):
        listener.client.subscribe(pattern)
    listener.client.publish(Packet(listeners_topic, b"", expiry_s=1))
    listener.client.drain(listener.deadline_s)
    for topic in (*tried.values(), last):
        sender.client.publish(Packet(topic, b"", expiry_s=5))
    arrived: set[str] = set()
    with suppress(DeadlineError):
        while (packet := listener.packet()).topic != last:
            arrived.add(packet.topic)
    return {family for family, topic in tried.items() if topic in arrived}


def _result(what: str, found: set[str], needed: set[str]) -> BrokerCheck:
    return BrokerCheck(
        what, ", ".join(sorted(found)) or "nothing", ", ".join(sorted(needed)), found == needed
    )


def _closed(what: str, party: Party) -> BrokerCheck:
    try:
        with probing(party, REFUSED_S):
            return BrokerCheck(what, "accepted", "rejected", ok=False)
    except ConnectError:
        return BrokerCheck(what, "rejected", "rejected", ok=True)
