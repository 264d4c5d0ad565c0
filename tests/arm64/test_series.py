"""Memory and processor time of an aarch64 agent with the default network of series, which it downloads from a broker.

Its wheels are those that `edge-fl flash --offline` puts on a card. They are only unpacked here: their installation, which takes minutes
under emulation, has a test of its own (test_first_boot.py).
"""

import json
import sys
import time
import zipfile
from pathlib import Path

import pytest

from edge_fl import metrics
from edge_fl.cli import cache_folder
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices.flash.wheels import gather
from edge_fl_server.release.repository import Repository
from tests.arm64 import site, userland
from tests.arm64.pi import Board, require, resident
from tests.conftest import Issue
from tests.devices.scripted import TOPICS, eventually
from tests.devices.test_figures import MEGABYTE, children

pytestmark = [pytest.mark.arm64, pytest.mark.broker, pytest.mark.timeout(1200)]
STEP_S = 300
READINGS = 10
EDGE_FL = ("/usr/bin/python3", "-m", "edge_fl")
# The processor time is that of all threads, of the user and of the system.
PREDICT = """
import json, statistics, sys, time
from pathlib import Path
from edge_fl.modalities import of
from edge_fl_devices.features.extractor import Extractor
from edge_fl_devices.serving.predict import Predictor

found = Predictor(sys.argv[1])
extractor = Extractor(found.extractor_path, found.manifest, threads=1)
predictor = Predictor(sys.argv[1], extractor=extractor)
window = of("series").read(Path(sys.argv[2]), found.manifest.input).samples[:1]
taken_ms = []
for _ in range(210):
    began_s = time.process_time()
    prediction = predictor.predictions(window)[0]
    taken_ms.append(1000 * (time.process_time() - began_s))
print(json.dumps([prediction.label, statistics.median(taken_ms[10:])]))
"""


def test_an_agent_of_series_stays_small_and_predicts_a_window_in_50_ms(
    broker: Mosquitto, issue: Issue, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    require()
    board, log = board_with_agent(tmp_path / "board"), tmp_path / "agent.log"
    site.identity(issue, board.root / "etc/identity")
    site.recordings(board.root / "srv/recordings")
    manifest, payload = site.kernels()
    assert (manifest.feature_dim, manifest.input.shape) == (1000, (6, 200))
    started_s = time.monotonic()
    with site.connected(broker, issue) as server, board.running(*agent(broker), log=log) as process:
        try:
            server.release(Repository(tmp_path / "server"), manifest, payload)
            server.assignment(site.DEVICE, "serve", run_id="toy", round=1, id="rel-1", release=1)
            meta = server.wait_for(site.DEVICE, "meta", lambda m: m.samples, deadline_s=STEP_S)
            assert (meta.machine, meta.samples) == ("aarch64", len(site.MOVEMENTS) * site.RECORDINGS)
            report = server.wait_for(site.DEVICE, "rpt", deadline_s=STEP_S)
            reported_s = time.monotonic() - started_s
            assert (report.release, report.error, report.bytes_down) == (1, "", len(payload))
            assert report.metrics[metrics.PERSONAL_AFTER] > 0.9
            server.ack(site.DEVICE, report.id)
            server.wait_for(site.DEVICE, "state", lambda s: (s.activity, s.release) == ("idle", 1))
            pid = the_agent(process.pid)
            eventually(lambda: not children(pid))
            program, emulator = max(readings(pid))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{log.read_text()[-3000:]}") from error
        (board.root / "tmp/predict.py").write_text(PREDICT)
        (movement,) = site.MOVEMENTS[3:4]
        measure = [
            "/usr/bin/python3",
            "/tmp/predict.py",
            "/var/lib/agent",
            f"/srv/recordings/{movement}/1.csv",
        ]
        label, window_ms = json.loads(board.run("env", "OMP_NUM_THREADS=1", *measure, deadline_s=STEP_S))
    with capsys.disabled():
        sys.stdout.write(
            f"\naarch64 under qemu, random-kernels: agent between fits {program / MEGABYTE:.1f} MB (and the emulator"
            f" {emulator / MEGABYTE:.1f} MB), a window to a prediction {window_ms:.1f} ms of processor time, start to report"
            f" {reported_s:.0f} s\n"
        )
    assert label == movement
    assert 30 * MEGABYTE < program <= 75 * MEGABYTE  # less than 30 would be another layout of addresses
    assert window_ms <= 50


def board_with_agent(root: Path) -> Board:
    """A board with the wheels of a card's bundle, unpacked where its Python finds them."""
    base = userland.build(userland.BASE)
    python = userland.python(base)
    board = Board(userland.copy(base, root))
    packages = root / f"usr/local/lib/python{python}/dist-packages"
    for wheel in gather((python,), cache_folder() / "wheels", offline=True).files:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
    return board


def agent(broker: Mosquitto) -> list[str]:
    options = {
        "--id": site.DEVICE,
        "--data": "/srv/recordings",
        "--dir": "/var/lib/agent",
        "--tier": "head",
        "--host": "127.0.0.1",
        "--port": str(broker.endpoint.port),
        "--fleet": TOPICS.fleet,
        "--identity": "/etc/identity",
    }
    return [*EDGE_FL, "device", "run", *(word for option in options.items() for word in option)]


def the_agent(pid: int) -> int:
    """The emulated process of the agent, a descendant of `pid`."""
    while b"\0edge_fl\0device\0run\0" not in (said := Path(f"/proc/{pid}/cmdline").read_bytes()) or (
        userland.QEMU.encode() not in said
    ):
        (pid,) = children(pid)
    return pid


def readings(pid: int) -> list[tuple[int, int]]:
    """Resident bytes of the agent's program and of its emulator, over some seconds."""
    found = []
    for _ in range(READINGS):
        found.append(resident(pid))
        time.sleep(0.5)
    return found
