"""What every package's tests may use: a real mosquitto."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from broker.config import Settings
from broker.find import Program, find
from broker.mosquitto import Mosquitto
from edge_fl.errors import ConnectError


@pytest.fixture(scope="session")
def mosquitto_program() -> Program:
    """The mosquitto of this machine; tests that need one are skipped where there is none."""
    try:
        return find()
    except ConnectError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def mosquitto(mosquitto_program: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mosquitto]:
    """One broker on a free loopback port for the whole session: clients need names, and topics, of their own."""
    with Mosquitto(Settings(tmp_path_factory.mktemp("mosquitto"), port=0), mosquitto_program) as broker:
        yield broker
