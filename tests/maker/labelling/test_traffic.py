"""Pictures never leave the device: all MQTT traffic of an agent, recorded while pictures are captured and labelled."""

import base64
import subprocess
import sys
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_devices import config as settings
from edge_fl_devices.serving.predict import Predictor
from edge_fl_server.release.repository import Repository
from tests.devices.scripted import TOPICS, ScriptedServer
from tests.maker.labelling.fruit import CLASSES, desk, fill, fruit, manifest

DEVICE = "pi-labels"
PIECE = 12  # bytes; random bytes contain a given piece of this length with a probability of 2^-96 per place


def pieces(picture: bytes) -> set[bytes]:
    """Parts of a picture's file and of its pixels, as bytes and in base64."""
    with Image.open(BytesIO(picture)) as opened:
        pixels = np.asarray(opened).tobytes()
    found: set[bytes] = set()
    for content in (picture[-400:], pixels[: 40 * PIECE], pixels[-40 * PIECE :]):
        found |= {content[start : start + PIECE] for start in range(0, len(content) - PIECE, PIECE)}
    return found | {base64.b64encode(piece) for piece in found if len(piece) % 3 == 0}


def leaked(payload: bytes, secret: set[bytes]) -> set[bytes]:
    return {piece for piece in secret if piece in payload}


@pytest.mark.broker
def test_labelling_sends_numbers_only(mosquitto: Mosquitto, tmp_path: Path) -> None:
    images, home = tmp_path / "images", tmp_path / "pi"
    images.mkdir()
    release, payload = manifest()
    server = ScriptedServer(partial(MqttTransport, mosquitto.endpoint, session_expiry_s=0), "labels-server")
    server.online()
    server.release(Repository(tmp_path / "server"), release, payload)
    file = tmp_path / "device.toml"
    file.write_text(
        f'id = "{DEVICE}"\ndata = "{images}"\nfolder = "{home}"\ntier = "head"\nwatch_s = 0.3\nrefit_every_s = 0\n'
        f'[broker]\nhost = "{mosquitto.endpoint.host}"\nport = {mosquitto.endpoint.port}\nfleet = "{TOPICS.fleet}"\n'
    )
    command = [sys.executable, "-m", "edge_fl", "device", "run", "--config", str(file)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as agent:
        try:
            server.wait_for(DEVICE, "meta")
            server.assignment(DEVICE, "serve", run_id="toy", round=1, id="rel-1", release=1)
            assert server.wait_for(DEVICE, "rpt").error == "no_labels"  # nothing is labelled yet
            server.ack(DEVICE, "rel-1")
            config = settings.remembered(home)
            assert config and config.data == f"folder:{images}"
            truth = fill(config, 3)
            with desk(config) as site:
                for _ in range(15):
                    picture = site.session.view("me").item
                    assert picture
                    site.session.label("me", picture.name, picture.version, truth[picture.name])
                assert site.learned().head == "cosine"
                report = server.wait_for(DEVICE, "rpt", lambda report: report.samples == 15)
        finally:
            agent.terminate()
            agent.wait(60)
    assert report.release == 1 and not report.error
    received = b"\n".join(payload for _, payload in server.received)
    server.leave()
    files = [path.read_bytes() for path in tmp_path.rglob("*.png")]
    secret = set().union(*(pieces(content) for content in files))
    assert len(files) == 18 and len(received) > 1000 and CLASSES[0].encode() not in received
    assert not leaked(received, secret)
    assert (
        leaked(received + files[0][-200:], secret) and leaked(base64.b64encode(files[0]), secret) is not None
    )
    assert Predictor(home).predictions(np.zeros((1, *release.input.shape), np.uint8))
    assert fruit(0, 0) in files
