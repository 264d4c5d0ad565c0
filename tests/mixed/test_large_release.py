"""45 MB to ten devices over mutual TLS, compared with mosquitto's client; a device killed at any chunk resumes its download.

The figures of B1 in docs/performance.md are printed: the same chunks, the same broker, the same certificates, ten mosquitto_sub processes
that throw away what they get, against ten agents that verify every chunk, write it, hash the whole and install it.
"""

import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from edge_fl.blob import describe
from edge_fl.release.manifests import Manifest
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.messages import Capability
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.topics import GROUP
from edge_fl.wire.transport import Packet
from edge_fl_broker.config import BrokerSettings, Certificates
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.agent.state import AgentLimits
from edge_fl_devices.features.extractor import runtime
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.install.fetch import LIMITS, FetchLimits
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import fit_here
from edge_fl_server.release.publish import Publisher
from edge_fl_server.release.repository import Repository
from tests.conftest import Issue
from tests.devices import graphs
from tests.devices.scripted import TOPICS, ScriptedServer, eventually
from tests.devices.site import DATA
from tools.memory_broker import InMemoryBroker, InMemoryTransport

MEGABYTES = 45
QUICK = AgentLimits(settle_s=0.05, resend_s=5.0, retry_s=0.1, return_s=0.1)


def extractor(values: int) -> bytes:
    """The linear extractor with `spare` unused weights."""
    spare = np.random.default_rng(0).normal(size=values).astype(np.float32)
    node = helper.make_node("Identity", ["z"], ["features"])
    return graphs.graph([node], [graphs.constant("spare", spare)])


def head_device(name: str, folder: Path, root: bytes, fetching: FetchLimits = LIMITS) -> Device:
    loader = LocalFeatureLoader(lambda classes, input: DATA, folder)
    worker = HeadWorker(
        name,
        Store(folder),
        FitSettings("nearest"),
        loader=loader,
        fitter=fit_here,
        runtime=runtime,
        check=lambda found: None,
        limits=QUICK,
        trust=Trust(folder / "tuf", root),
    )
    can = Capability("head", "test", "3", samples=20)
    return Device(name, TOPICS, can, worker, limits=QUICK, fetching=fetching)


@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.timeout(600)
def test_45_megabytes_reach_ten_devices_over_tls(
    mosquitto_program: Program, issue: Issue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    payload = extractor(MEGABYTES * 250_000)
    settings = BrokerSettings(
        tmp_path / "mosquitto", port=0, fleet=TOPICS.fleet, certificates=Certificates(*issue("broker"))
    )
    repository = Repository(tmp_path / "home")
    manifest = graphs.manifest_for(payload, release=1, extractor=describe(payload))
    with Mosquitto(settings, mosquitto_program) as broker:

        def connect(client: str, will: Any, deliver: Any, **options: Any) -> MqttTransport:
            ca, cert, key = issue(client)
            endpoint = Endpoint("127.0.0.1", broker.endpoint.port, ca, cert, key)
            return MqttTransport(endpoint, client, will, deliver, **options)

        server = ScriptedServer(connect)
        server.online()
        began_s = time.monotonic()
        Publisher(server.transport, TOPICS, repository).publish(
            manifest, {manifest.extractor.sha256: payload}
        )
        published_s = time.monotonic() - began_s
        stock_s = _stock(broker.endpoint.port, issue, manifest)
        runner = Runner(workers=2)
        devices = [
            head_device(f"pi-{n:02d}", tmp_path / f"pi-{n:02d}", repository.root_bytes) for n in range(10)
        ]
        for device in devices:
            runner.add(device, connect)
            server.assignment(device.name, "serve", run_id="toy", round=1, id="rel-1", release=1)
        began_s = time.monotonic()
        thread = threading.Thread(target=partial(runner.run, deadline_s=300), daemon=True)
        thread.start()
        try:
            eventually(lambda: all(found.state.release == 1 for found in devices), 300)
            ours_s = time.monotonic() - began_s
        finally:
            runner.stop()
            thread.join(30)
        server.transport.close()
    reports = [device.reporting.last["head"] for device in devices]
    assert {report.bytes_down for report in reports} == {len(payload)}
    assert {Slots(tmp_path / d.name / "release").current().extractor.stat().st_size for d in devices} == {
        len(payload)
    }
    total = 10 * len(payload) / 1e6
    with capsys.disabled():
        sys.stdout.write(
            f"\n{len(payload) / 1e6:.0f} MB over mTLS: published in {published_s:.2f} s; to 10 mosquitto_sub"
            f" {stock_s:.2f} s ({total / stock_s:.0f} MB/s); to 10 agents, verified, written, installed and reported"
            f" {ours_s:.2f} s ({total / ours_s:.0f} MB/s)\n"
        )


def _stock(port: int, issue: Issue, manifest: Manifest) -> float:
    """Seconds until ten mosquitto_sub have every chunk."""
    program = shutil.which("mosquitto_sub")
    if program is None:
        pytest.skip("no mosquitto_sub on this machine")
    children = []
    began_s = time.monotonic()
    for number in range(10):
        ca, cert, key = map(str, issue(f"stock-{number}"))
        topic = TOPICS.chunk_group(manifest.extractor.sha256, "+")
        order = [
            program,
            "-V",
            "5",
            "-h",
            "127.0.0.1",
            "-p",
            str(port),
            "--cafile",
            ca,
            "--cert",
            cert,
            "--key",
            key,
        ]
        order += [
            "-i",
            f"stock-{number}",
            "-q",
            "1",
            "-t",
            topic,
            "-C",
            str(len(manifest.extractor.chunks)),
            "-N",
        ]
        children.append(subprocess.Popen(order, stdout=subprocess.DEVNULL))
    try:
        for child in children:
            assert child.wait(300) == 0
    finally:
        for child in children:
            child.kill()
            child.wait()
    return time.monotonic() - began_s


@pytest.mark.parametrize("chunk", [0, 1, GROUP - 1, GROUP, GROUP + 5, 39])
def test_a_device_killed_at_any_chunk_fetches_none_of_the_verified_ones_again(
    tmp_path: Path, chunk: int
) -> None:
    payload, broker = extractor(10_000), InMemoryBroker()
    manifest = graphs.manifest_for(payload, release=1)
    count = len(manifest.extractor.chunks)
    assert count == 40
    connect = partial(InMemoryTransport, broker)
    server, repository = ScriptedServer(connect), Repository(tmp_path / "home")
    server.online()
    server.release(repository, manifest, payload)
    server.assignment("pi-01", "serve", run_id="toy", round=1, id="rel-1", release=1)
    came: Counter[int] = Counter()

    def run(stop_at: int) -> None:
        """One process of the device; it hears nothing any more once `stop_at` chunks have come."""
        dead: list[bool] = []

        def through(client: str, will: Any, deliver: Any, **options: Any) -> InMemoryTransport:
            def on_event(event: object) -> None:
                if isinstance(event, Packet) and "/art/" in event.topic and not dead:
                    if came.total() >= stop_at:
                        dead.append(True)
                    else:
                        came[int(event.topic.rpartition("/")[2])] += 1
                if not dead:
                    deliver(event)

            return connect(client, will, on_event, **options)

        device = head_device("pi-01", tmp_path / "pi-01", repository.root_bytes, FetchLimits(quiet_s=0.05))
        runner = Runner()
        runner.add(device, through)

        def over() -> bool:
            missing = Slots(tmp_path / "pi-01" / "release").sink(manifest.extractor).missing
            return device.state.release == 1 or (bool(dead) and len(missing) == count - came.total())

        runner.run(30, over, every_s=0.02)

    run(chunk)
    assert came.total() == chunk
    run(count + 1)
    assert came == dict.fromkeys(range(count), 1), "every chunk came exactly once"
    server.leave()
    broker.close()
