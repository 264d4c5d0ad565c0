"""A fleet with faults: devices crash and restart on their own folders, leave permanently, or lose their connections together."""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edge_fl.data.partition import DataConfig
from edge_fl_devices.agent.state import AgentLimits
from edge_fl_devices.simulated.fleet import DeviceResult, FleetConfig, names, run_fleet
from tests.devices.scripted import ScriptedServer, eventually
from tools.chaos.injector import FaultInjector
from tools.chaos.profile import Chaos, Devices, Restarts
from tools.memory_broker import InMemoryBroker, InMemoryTransport

DEVICES = 3


@pytest.fixture
def broker() -> Iterator[InMemoryBroker]:
    broker = InMemoryBroker()
    yield broker
    broker.close()


class Fleet:
    """A head-only fleet with a profile, in a thread, and a scripted server."""

    def __init__(self, broker: InMemoryBroker, folder: Path, chaos: Chaos, restarts: Any = None) -> None:
        connect = partial(InMemoryTransport, broker)
        self.server = ScriptedServer(connect)
        self.server.online()
        config = FleetConfig(
            DataConfig(clients=DEVICES, fraction=0.1),
            full=0,
            folder=folder,
            fleet="test",
            limits=AgentLimits(settle_s=0.05),
        )
        faults = partial(FaultInjector, chaos, restarts=restarts)
        self.results: list[DeviceResult] = []
        self._runners: list[Any] = []
        run = partial(run_fleet, config, connect, faults=faults, on_start=self._runners.append, every_s=0.02)
        self._thread = threading.Thread(target=lambda: self.results.extend(run()))
        self._thread.start()

    def boots(self, device: str) -> list[str]:
        """Boot ids of a device that became ready, in order."""
        states = self.server.messages(device, "state")
        return list(dict.fromkeys(state.boot for state in states if state.status == "ready"))

    def statuses(self, device: str) -> list[str]:
        return [state.status for state in self.server.messages(device, "state")]

    def end(self) -> list[str]:
        """Stops it -> the devices that were there at the end."""
        eventually(lambda: self._runners)
        self._runners[0].stop()
        self._thread.join(30)
        assert not self._thread.is_alive()
        return [found.device for found in self.results]


def test_a_device_that_crashed_comes_back_as_another_boot(broker: InMemoryBroker, tmp_path: Path) -> None:
    chaos = Chaos(1, 0.5, 0.6, devices=Devices(crash=1.0, away_s=(0.1, 0.3)))
    fleet = Fleet(broker, tmp_path, chaos)
    for name in names(DEVICES):
        eventually(lambda: len(fleet.boots(name)) == 2)  # noqa: B023
        assert "lost" in fleet.statuses(name)
    assert fleet.end() == names(DEVICES)


def test_a_device_that_left_does_not_come_back(broker: InMemoryBroker, tmp_path: Path) -> None:
    fleet = Fleet(broker, tmp_path, Chaos(1, 0.5, 0.6, devices=Devices(crash=1.0, leave=1.0, away_s=(0, 0))))
    for name in names(DEVICES):
        eventually(lambda: fleet.statuses(name)[-1:] == ["lost"])  # noqa: B023
    assert fleet.end() == []


def test_a_brokers_restart_cuts_all_at_once_and_all_come_back_as_they_were(
    broker: InMemoryBroker, tmp_path: Path
) -> None:
    fleet = Fleet(broker, tmp_path, Chaos(1, 0.5, 0.6, broker=Restarts(1, down_s=0.2)))
    for name in names(DEVICES):
        eventually(lambda: fleet.statuses(name).count("ready") == 2)  # noqa: B023
        assert "lost" in fleet.statuses(name) and len(fleet.boots(name)) == 1
    assert fleet.end() == names(DEVICES)


def test_commands_take_the_broker_down_and_up_again(broker: InMemoryBroker, tmp_path: Path) -> None:
    down, up = tmp_path / "down", tmp_path / "up"
    restarts = Restarts(1, 0.1, ["touch", str(down)], ["touch", str(up)])
    fleet = Fleet(broker, tmp_path, Chaos(1, 0.1, 0.2, broker=restarts))
    eventually(up.exists)
    assert down.stat().st_mtime_ns <= up.stat().st_mtime_ns
    assert fleet.end() == names(DEVICES)
