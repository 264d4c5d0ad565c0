"""Predictions on other data than a head was fitted on: the device detects drift, the fleet page shows it."""

import threading
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from edge_fl.modalities import scaled
from edge_fl.wire.messages import Capability
from edge_fl.wire.topics import Topics
from edge_fl_console.dashboard.pages import fleet
from edge_fl_console.dashboard.pages.fleet import FleetQuery, FleetRow
from edge_fl_devices.agent.effects import Job
from edge_fl_devices.agent.events import Event
from edge_fl_devices.board.usage import Meter
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data.current import CurrentData
from edge_fl_devices.features import drift
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.monitor import DeviceMonitor
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.serving.predict import Predictor
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.worker import Worker
from edge_fl_server.mqtt import connector
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.devices.roster import Roster
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.registry import Database
from tests.devices import graphs
from tests.devices.conftest import folder
from tests.devices.images import X
from tests.devices.scripted import eventually
from tests.devices.site import QUICK
from tools.memory_broker import InMemoryBroker, InMemoryTransport

__all__ = ["folder"]


class Idle(Worker):
    """A worker that does nothing, and whose device has no release to fit on."""

    def installed(self) -> int:
        return 0

    def perform(self, job: Job, material: Mapping[str, bytes] | bytes | None) -> Event:
        raise AssertionError(job)


def test_drift_of_predictions_reaches_the_devices_row_on_the_fleet_page(folder: Path, tmp_path: Path) -> None:
    broker, runner = InMemoryBroker(), Runner()
    connect = partial(InMemoryTransport, broker)
    device = Device(
        "pi-01", Topics("main"), Capability("head", "test", "3"), Idle("pi-01", Store(folder)), limits=QUICK
    )
    config = DeviceConfig("pi-01", str(tmp_path), folder=str(folder))
    meter = Meter(folder, lambda: 0)
    monitor = DeviceMonitor(
        config,
        device,
        partial(runner.deliver, device),
        meter,
        lambda snapshot: device.state.capability,
        CurrentData(config),
    )
    with closing(Database.open(tmp_path / "registry.sqlite")) as db, Journal(db) as journal:
        connection = ServerConnection(connect, journal, limits=connector.LeaseLimits(settle_s=0.05))
        Roster(connection)
        connection.open()
        journal.begin(connection.epoch)
        runner.add(device, connect)
        thread = threading.Thread(target=partial(runner.run, deadline_s=600), daemon=True)
        thread.start()

        def row() -> FleetRow | None:
            found = fleet.read(db, "main", FleetQuery()).rows
            return found[0] if found and found[0].status == "ready" else None

        predictor = Predictor(folder, remember=True)
        drift.remember_fit(
            folder, drift.moments(predictor.head.extractor, scaled(X).reshape(12, -1) @ graphs.WEIGHTS)
        )
        monitor.check()
        assert eventually(row).drift == 0
        for _ in range(5):
            predictor.predict(np.full_like(X, 255))
        monitor.check()
        shown = eventually(lambda: (found := row()) and found.drift and found)
        assert shown.why == "drift" and shown.drift > drift.THRESHOLD
        runner.stop()
        thread.join(90)
        connection.close()
    broker.close()
