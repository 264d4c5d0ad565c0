"""B1 and B2 of docs/performance.md: 45 MB to one device and to fifty, compared with mosquitto's clients; timings are printed, not checked.

Theirs is one message of 45 MB from mosquitto_pub to mosquitto_sub processes, on a mosquitto as it comes: thrown away, or kept, which is
written, forced to the disk and hashed. Ours is chunks that are published, signed for, pulled, verified, written, forced to the disk,
hashed as a whole and installed, on the broker as we configure it, the agents in one process, while another client subscribes to chunks
and never reads one.
"""

import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from edge_fl.blob import describe
from edge_fl.wire.mqtt.loop import MqttLoop
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl.wire.transport import Packet
from edge_fl_broker.config import BrokerSettings
from edge_fl_broker.find import Program
from edge_fl_broker.mosquitto import Mosquitto, free_port
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.runtime.runner import Runner
from edge_fl_devices.storage.slots import Slots
from edge_fl_server.release.publish import Publisher
from edge_fl_server.release.repository import Repository
from tests.devices import graphs
from tests.devices.scripted import TOPICS, ScriptedServer, eventually
from tests.mixed.test_large_release import MEGABYTES, extractor, head_device

pytestmark = [pytest.mark.slow, pytest.mark.broker, pytest.mark.timeout(900)]

WAIT_S = 300.0


def peak_mb(pid: int) -> float:
    """The peak memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024


def stock(program: Program, folder: Path, payload: bytes, devices: int, *, keep: bool) -> tuple[float, float]:
    """Seconds until so many mosquitto_sub have the file that mosquitto_pub sends, and the broker's peak memory in MB.

    With `keep` each writes it to a file, forces that to the disk and has its sha256 computed.
    """
    publish, subscribe = shutil.which("mosquitto_pub"), shutil.which("mosquitto_sub")
    if not (publish and subscribe):
        pytest.skip("mosquitto_pub or mosquitto_sub: none on this machine")
    file, settings, port = folder / "extractor", folder / "stock.conf", str(free_port("127.0.0.1"))
    file.write_bytes(payload)
    settings.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nset_tcp_nodelay true\n")
    broker = subprocess.Popen([program.path, "-c", str(settings)], stderr=subprocess.DEVNULL)
    at = ["-h", "127.0.0.1", "-p", port, "-q", "1", "-t", "extractor"]
    children = []
    try:
        eventually(
            lambda: subprocess.run([publish, *at, "-n"], stderr=subprocess.DEVNULL).returncode == 0, 60
        )
        order = shlex.join([subscribe, *at, "-C", "1", "-N"])
        kept = (shlex.quote(str(folder / f"kept-{n}")) for n in range(devices))
        orders = [f"{order} > {path} && sync {path} && sha256sum {path}" if keep else order for path in kept]
        children = [subprocess.Popen(["sh", "-c", order], stdout=subprocess.DEVNULL) for order in orders]
        time.sleep(2.0)  # until all of them are there
        began_s = time.monotonic()
        subprocess.run([publish, *at, "-f", str(file)], check=True)
        for child in children:
            assert child.wait(WAIT_S) == 0
        return time.monotonic() - began_s, peak_mb(broker.pid)
    finally:
        for child in (*children, broker):
            child.kill()
            child.wait()


@contextmanager
def stalled(broker: Mosquitto, sha256: str) -> Iterator[None]:
    """A client with its own loop that blocks at the first chunk."""
    until = threading.Event()

    def on_event(event: object) -> None:
        if isinstance(event, Packet):
            until.wait(WAIT_S)

    client = MqttTransport(broker.endpoint, "stalled", None, on_event, loop=MqttLoop())
    client.wait_connected(60)
    client.subscribe(TOPICS.chunk_group(sha256, 0), qos=0)
    yield
    until.set()
    client.close(clean=False)


def has_installed(device: Device) -> bool:
    """Whether the release is current on this device's disk; a head may not be fitted on it yet."""
    work = device.state.work
    return device.state.release == 1 or (work is not None and work.activity == "fitting")


def dropped(broker: Mosquitto) -> int:
    """The number of messages that the broker dropped."""
    counts: list[int] = []

    def on_event(event: object) -> None:
        if isinstance(event, Packet):
            counts.append(int(event.payload))

    client = MqttTransport(broker.endpoint, "counter", None, on_event)
    client.wait_connected(60)
    client.subscribe("$SYS/broker/publish/messages/dropped")
    eventually(lambda: counts, 90)
    client.close()
    return counts[-1]


@dataclass(frozen=True)
class Ours:
    """Seconds until all devices have installed the release, those of them that publishing took, and the broker's peak memory in MB."""

    seconds: float
    published_s: float
    broker_mb: float


def ours(program: Program, folder: Path, payload: bytes, number: int) -> Ours:
    """Agents in this process install a release, each in its own folder."""
    repository = Repository(folder / "home")
    manifest = graphs.manifest_for(payload, release=1, extractor=describe(payload))
    with Mosquitto(BrokerSettings(folder / "mosquitto", port=0, fleet=TOPICS.fleet), program) as broker:
        connect, runner = partial(MqttTransport, broker.endpoint), Runner(workers=2)
        server = ScriptedServer(connect)
        server.online()
        devices = [
            head_device(f"pi-{n:02d}", folder / f"pi-{n:02d}", repository.root_bytes) for n in range(number)
        ]
        for device in devices:
            runner.add(device, connect)
        threading.Thread(target=partial(runner.run, deadline_s=WAIT_S), daemon=True).start()
        eventually(lambda: all(device.is_quiet for device in devices), 60)
        with stalled(broker, manifest.extractor.sha256):
            began_s = time.monotonic()
            Publisher(server.transport, TOPICS, repository).publish(
                manifest, {manifest.extractor.sha256: payload}
            )
            published_s = time.monotonic() - began_s
            for device in devices:
                server.assignment(device.name, "serve", run_id="toy", round=1, id="rel-1", release=1)
            eventually(lambda: all(map(has_installed, devices)), WAIT_S)
            seconds, broker_mb, lost = time.monotonic() - began_s, peak_mb(broker.pid), dropped(broker)
        eventually(lambda: all(device.state.release == 1 for device in devices), WAIT_S)
        runner.stop()
        server.transport.close()
    assert lost == 0
    for device in devices:
        assert device.reporting.last["head"].bytes_down == len(payload)
        found = Slots(folder / device.name / "release").current()
        assert found is not None
        assert found.extractor.stat().st_size == len(payload)
    return Ours(seconds, published_s, broker_mb)


def nightly(number: int, turns: int) -> Any:
    return pytest.param(number, turns, marks=pytest.mark.nightly)


def spread(values: list[float]) -> str:
    """Median, with minimum and maximum in brackets."""
    return f"{median(values):.2f}" + (f" ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else "")


@pytest.mark.parametrize(("number", "turns"), [(1, 1), nightly(1, 7), nightly(50, 1)])
def test_45_megabytes_compared_with_mosquittos_clients(
    number: int, turns: int, mosquitto_program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    payload = extractor(MEGABYTES * 250_000)
    thrown, kept, found = [], [], []
    for turn in range(turns):
        folder = tmp_path / str(turn)
        folder.mkdir()
        thrown.append(stock(mosquitto_program, folder, payload, number, keep=False))
        kept.append(stock(mosquitto_program, folder, payload, number, keep=True))
        found.append(ours(mosquitto_program, folder, payload, number))
        shutil.rmtree(folder)
    seconds = [one.seconds for one in found]
    with capsys.disabled():
        sys.stdout.write(
            f"\n{len(payload) / 1e6:.0f} MB to {number}, {turns} turns: mosquitto_pub and mosquitto_sub"
            f" {spread([took for took, _ in thrown])} s thrown away, {spread([took for took, _ in kept])} s kept,"
            f" broker {max(mb for _, mb in thrown):.0f} MB; ours {spread(seconds)} s, of which published"
            f" {spread([one.published_s for one in found])} s, broker {max(one.broker_mb for one in found):.0f} MB with one stalled;"
            f" {spread([theirs / own for (theirs, _), own in zip(thrown, seconds, strict=True)])} and"
            f" {spread([theirs / own for (theirs, _), own in zip(kept, seconds, strict=True)])} times as fast\n"
        )
