"""`check` approves of a broker that edge-fl can use, and names what is wrong with another."""

from pathlib import Path

import pytest

from edge_fl.errors import ConnectError
from edge_fl.wire.mqtt.transport import Endpoint, MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet
from edge_fl_broker.checks import check, temporary_parties
from edge_fl_broker.config import BrokerSettings, MosquittoLimits
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from tests.edge_fl.wire.brokers import held_port


@pytest.mark.broker
def test_our_own_broker_passes_and_nothing_is_left_behind(mosquitto: Mosquitto) -> None:
    findings = check(*temporary_parties(mosquitto.endpoint), "checked")
    assert [finding.what for finding in findings] == [
        "packet size",
        "retained messages",
        "round trip",
        "sessions",
        "shared subscriptions",
    ]
    # a figure of a shared machine
    assert all(finding.ok for finding in findings if finding.what != "round trip")
    left: list[object] = []
    watcher = MqttTransport(mosquitto.endpoint, "watcher", None, left.append, session_expiry_s=0)
    watcher.wait_connected(60)
    watcher.subscribe(f"{Topics('checked').root}/#")
    watcher.publish(Packet("last", b""))
    watcher.drain(60)
    watcher.close()
    assert not [event for event in left if isinstance(event, Packet)]


@pytest.mark.broker
def test_a_broker_that_takes_small_packets_only_is_named(tmp_path: Path, mosquitto_program: Program) -> None:
    settings = BrokerSettings(tmp_path, port=0, limits=MosquittoLimits(max_packet_bytes=100_000))
    with Mosquitto(settings, mosquitto_program) as broker:
        assert [
            finding.what
            for finding in check(*temporary_parties(broker.endpoint), "checked")
            if not finding.ok
        ] == ["packet size"]


def test_no_broker_is_a_connect_error() -> None:
    with held_port() as port, pytest.raises(ConnectError, match="Connection refused"):
        check(*temporary_parties(Endpoint(port=port)), "checked", deadline_s=3)
