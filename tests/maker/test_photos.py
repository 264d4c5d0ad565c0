"""Memory with a backbone and 200 photos of 12 megapixels, of an agent and of the process that serves, and the bounds for boards of 512 MB.

pytest tests/maker/test_photos.py -s; the 200 with --hypothesis-profile nightly
"""

import json
import re
import subprocess
import sys
import urllib.request
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_fl.modalities.pictures import ORIENTATION
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_server.release.repository import Repository
from tests.devices.scripted import TOPICS, ScriptedServer
from tests.devices.test_figures import MEGABYTE, Scales, resident
from tools.bench import backbone

DEVICE = "pi-photos"
SHAPE = (4000, 3000)
ORIENTATIONS = 8
IDLE_MB, PEAK_MB, SERVING_MB = 75, 300, 120


def photos(folder: Path, different: int) -> None:
    """As a phone takes them, each held in all 8 directions: pictures of two classes."""
    rng = np.random.default_rng(0)
    for number in range(different):
        label = number % 2
        rough = rng.integers(0, 120, (24, 32, 3)).astype(np.uint8) + np.uint8(120 * label)
        encoded = BytesIO()
        Image.fromarray(rough).resize(SHAPE, Image.Resampling.BICUBIC).save(encoded, "JPEG", quality=90)
        payload = encoded.getvalue()
        (folder / "cd"[label]).mkdir(parents=True, exist_ok=True)
        for orientation in range(1, ORIENTATIONS + 1):
            exif = Image.Exif()
            exif[ORIENTATION] = orientation
            block = exif.tobytes()
            header = b"\xff\xd8\xff\xe1" + (len(block) + 2).to_bytes(2, "big") + block
            (folder / "cd"[label] / f"{number}-{orientation}.jpg").write_bytes(header + payload[2:])


def serve(home: Path, picture: Path) -> tuple[dict[str, object], float]:
    """Start `device serve` and ask it about a picture -> its answer, and its peak of resident memory in MB."""
    command = [sys.executable, "-m", "edge_fl", "device", "serve", "--dir", str(home), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        address = next(found[0] for line in process.stderr if (found := re.search(r"http://\S+", line)))
        with urllib.request.urlopen(address, picture.read_bytes(), timeout=60) as response:
            answer = json.load(response)
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.terminate()
    peak = re.search(r"VmHWM:\s+(\d+)", status)
    assert peak
    return answer, int(peak[1]) / 1024


@pytest.mark.timeout(500)
@pytest.mark.slow
@pytest.mark.broker
@pytest.mark.parametrize(
    "different", [pytest.param(5, id="40"), pytest.param(25, id="200", marks=pytest.mark.nightly)]
)
def test_a_backbone_and_photos_fit_a_board_of_512_mb(
    mosquitto: Mosquitto, tmp_path: Path, capsys: pytest.CaptureFixture[str], different: int
) -> None:
    album, home = tmp_path / "images", tmp_path / "pi"
    photos(album, different)
    manifest, payloads = backbone.released(["c", "d"])
    server = ScriptedServer(partial(MqttTransport, mosquitto.endpoint, session_expiry_s=0), "photos-server")
    server.online()
    server.release(Repository(tmp_path / "server"), manifest, payloads[manifest.extractor.sha256])
    broker = ["--host", mosquitto.endpoint.host, "--port", str(mosquitto.endpoint.port)]
    what = ["--id", DEVICE, "--data", str(album), "--dir", str(home), "--tier", "head"]
    command = [sys.executable, "-m", "edge_fl", "device", "run", *what, *broker, "--fleet", TOPICS.fleet]
    agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    scales = Scales(agent.pid)
    try:
        server.wait_for(DEVICE, "state", lambda state: state.status == "ready")
        idle = resident(agent.pid)
        counting = scales.peak
        server.assignment(DEVICE, "serve", run_id="toy", round=1, id="rel-1", release=1)
        report = server.wait_for(DEVICE, "rpt", deadline_s=300)
        server.ack(DEVICE, "rel-1")
        server.wait_for(DEVICE, "state", lambda state: state.activity == "idle" and state.release == 1)
        between = resident(agent.pid)
    finally:
        scales.stop()
        agent.terminate()
        agent.wait(60)
    server.leave()
    assert not report.error and report.release == 1
    served, serving = serve(home, next((album / "c").iterdir()))
    assert served["status"] == "answered"
    figures = {
        "agent, before the first release": (idle / MEGABYTE, IDLE_MB),
        "agent, between fits": (between / MEGABYTE, IDLE_MB),
        "agent and children, while counting": (counting / MEGABYTE, PEAK_MB),
        "agent and children, peak of install and fit": (scales.peak / MEGABYTE, PEAK_MB),
        "process that serves, peak with a photo": (serving, SERVING_MB),
    }
    with capsys.disabled():
        count = ORIENTATIONS * different
        sys.stdout.write(f"\nEfficientNet-Lite0, {count} photos of 12 megapixels, MB\n")
        for name, (value, bound) in figures.items():
            sys.stdout.write(f"  {name:50s} {value:6.0f} <= {bound}\n")
    assert {name for name, (value, bound) in figures.items() if value > bound} == set()
