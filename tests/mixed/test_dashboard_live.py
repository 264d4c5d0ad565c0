"""The dashboard against a live fleet: a real broker, real agents, a running server's roll-outs, a real browser."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_fl.data.samples import ClientData, Samples
from edge_fl.wire.messages import Capability, DeviceState, encode
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Packet
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.agent.state import AgentLimits
from edge_fl_devices.features.extractor import runtime
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.install.fetch import FetchLimits
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import fit_here
from edge_fl_server.mqtt.connection import ServerConnection
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.mqtt.session import Server
from edge_fl_server.registry import Database, rollouts
from edge_fl_server.registry.tables import ReleaseRecord
from edge_fl_server.release.repository import Repository
from edge_fl_server.release.rollout.coordinator import RolloutCoordinator
from tests.browsing import dashboard, visiting
from tests.devices import graphs

pytestmark = [pytest.mark.browser, pytest.mark.broker, pytest.mark.timeout(900)]

QUICK = AgentLimits(settle_s=0.05, resend_s=2.0, retry_s=0.1, return_s=0.1)
NAMES = tuple(f"pi-{number}" for number in range(6))


def images(count: int) -> Samples:
    """Two classes, dark and bright."""
    y = np.arange(count) % 2
    return Samples((np.full((count, 1, 4, 4), 60) + 120 * y[:, None, None, None]).astype("uint8"), y)


@dataclass
class Live:
    """A running server, and agents that join on request."""

    broker: Mosquitto
    folder: Path
    db: Database
    rollout: RolloutCoordinator
    repository: Repository
    runner: Runner
    devices: dict[str, Device] = field(default_factory=dict)
    transports: list[MqttTransport] = field(default_factory=list)

    @property
    def registry(self) -> Path:
        return self.folder / "server" / "registry.sqlite"

    def join(self, *names: str) -> None:
        for name in names:
            worker = HeadWorker(
                name,
                Store(self.folder / name),
                FitSettings("nearest"),
                loader=LocalFeatureLoader(
                    lambda classes, input: ClientData(images(20), images(4), images(20)), self.folder / name
                ),
                fitter=fit_here,
                runtime=runtime,
                check=lambda installed: None,
                limits=QUICK,
                trust=Trust(self.folder / name / "tuf", self.repository.root_bytes),
            )
            can = Capability("head", "test", "3", samples=20, samples_per_class=[10, 10], head="nearest")
            device = Device(
                name, Topics("main"), can, worker, limits=QUICK, fetching=FetchLimits(quiet_s=0.05)
            )
            self.devices[name] = device
            self.runner.add(device, partial(MqttTransport, self.broker.endpoint))

    def release(self) -> int:
        number = self.repository.next_release()
        weights = np.random.default_rng(number).random((16, graphs.DIM), np.float32)
        payload = graphs.graph(weights=weights)
        manifest = graphs.manifest_for(payload, release=number)
        self.rollout.roll_out(manifest, {manifest.extractor.sha256: payload})
        blob = manifest.extractor
        rollouts.record_release(
            self.db, ReleaseRecord("main", number, "toy", number, "fedrep", blob.sha256, blob.bytes)
        )
        return number

    def mute(self, name: str) -> None:
        """Connect a head-only device that is ready but never responds."""
        topics = Topics("main")
        transport = MqttTransport(self.broker.endpoint, name, None, lambda event: None)
        transport.wait_connected(60)
        transport.publish(
            Packet(topics.up(name, "meta"), encode(Capability("head", "test", "3")), retain=True)
        )
        transport.publish(Packet(topics.up(name, "state"), encode(DeviceState("ready", "b1")), retain=True))
        self.transports.append(transport)

    def serving(self) -> set[int]:
        return {device.state.release for device in self.devices.values()}


@pytest.fixture
def live(mosquitto_program: Program, tmp_path: Path) -> Iterator[Live]:
    with Mosquitto(BrokerSettings(tmp_path / "mosquitto", port=0), mosquitto_program) as broker:
        db = Database.open(tmp_path / "server" / "registry.sqlite")
        with Journal(db, "main") as journal:
            connection = ServerConnection(partial(MqttTransport, broker.endpoint), journal)
            server = Server.of(connection)
            connection.open()
            journal.begin(connection.epoch)
            repository = Repository(tmp_path / "releases" / "main")
            rollout = RolloutCoordinator(server, repository)
            runner = Runner(workers=2)
            thread = threading.Thread(target=partial(runner.run, deadline_s=880), daemon=True)
            thread.start()
            live = Live(broker, tmp_path, db, rollout, repository, runner)
            yield live
            for transport in live.transports:
                transport.close()
            runner.stop()
            thread.join(90)
            rollout.close()
            connection.close()
        db.close()


def eventually(claim: Callable[[], object], deadline_s: float = 90.0) -> None:
    until = time.monotonic() + deadline_s
    while not claim():
        assert time.monotonic() < until, "did not happen"
        time.sleep(0.05)


def test_rows_appear_and_a_device_that_goes_away_turns_lost(live: Live, browser: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "images.npz", x=images(40).x, y=images(40).y)
    with dashboard(live.registry) as service, visiting(browser, service.address) as visit:
        visit.go("/fleet")
        assert "No device yet" in visit.page.inner_text("main")
        live.join(*NAMES)
        visit.page.wait_for_function(f"document.querySelectorAll('tbody tr').length === {len(NAMES)}")
        command = [
            sys.executable,
            "-m",
            "edge_fl",
            "device",
            "run",
            "--id",
            "pi-far",
            "--dir",
            str(tmp_path / "far"),
        ]
        where = ["--host", "127.0.0.1", "--port", str(live.broker.endpoint.port)]
        data = ["--data", str(tmp_path / "images.npz"), "--tier", "head"]
        far = subprocess.Popen([*command, *where, *data], stderr=subprocess.DEVNULL, env={**os.environ})
        try:
            visit.page.wait_for_selector("tr:has([data-key=to-pi-far]) .word.good")
        finally:
            far.kill()
            far.wait(60)
        visit.page.wait_for_selector("tr:has([data-key=to-pi-far]) .word.bad:text('lost')")
        assert visit.page.locator("tbody .word.good").count() == len(NAMES)
        visit.page.click("[data-key=to-pi-far]")
        visit.page.wait_for_selector("h1:text('pi-far')")
        assert "lost" in visit.page.inner_text(".head")


def test_a_roll_out_is_started_and_rolled_back_from_the_page(live: Live, browser: Any) -> None:
    live.join(*NAMES)
    for number in (1, 2):
        live.release()
        live.rollout.wait(0, 60)
        eventually(lambda number=number: live.serving() == {number})
    home = live.folder / "releases"
    with (
        dashboard(live.registry, "--home", str(home)) as service,
        visiting(browser, service.address) as visit,
    ):
        page = visit.page
        visit.go("/releases")
        assert page.inner_text("[data-act='start:1']") == "Roll back to release 1"

        page.click("[data-act='start:1']")
        page.click("#confirm")
        page.wait_for_selector(
            ".q-notification:has-text('Roll-back to release 1 requested; the server carries it out')"
        )
        eventually(lambda: live.serving() == {1})
        page.wait_for_selector("text=Last roll-out: release 1, completed")

        page.click("[data-act='again:2']")
        page.click("#confirm")
        eventually(lambda: live.serving() == {2})
        page.wait_for_selector("text=Last roll-out: release 2, completed")

        live.mute("pi-mute")  # never responds, so that the next roll-out waits for it and can be rolled back
        live.release()
        page.click("[data-act^='rollback:']")
        page.wait_for_selector(".q-dialog:has-text('will return from release 3 to release 2')")
        page.click("#confirm")
        page.wait_for_selector("text=Last roll-out: release 3, rolled back")
        eventually(lambda: live.serving() == {2})
