"""A broker with TLS and client certificates."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_fl_broker.config import BrokerSettings, Certificates
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from tests.conftest import Issue
from tests.devices.scripted import TOPICS


@pytest.fixture
def broker(mosquitto_program: Program, issue: Issue, tmp_path: Path) -> Iterator[Mosquitto]:
    """Broker on a free loopback port."""
    certificates = Certificates(*issue("broker"))
    settings = BrokerSettings(tmp_path / "mosquitto", port=0, fleet=TOPICS.fleet, certificates=certificates)
    with Mosquitto(settings, mosquitto_program) as broker:
        yield broker
