"""Set-up of the arm64 tests: the device's identity, pictures and recordings, and a server with a release for either."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from edge_fl.config import MethodConfig, MethodSpec, ModelConfig
from edge_fl.inputs import InputSpec
from edge_fl.methods import PRETRAINED, build_method
from edge_fl.methods.contract import steps
from edge_fl.models import backbone_input, with_pinned_weights
from edge_fl.release.manifests import Manifest
from edge_fl.wire.endpoint import Endpoint
from edge_fl.wire.mqtt.transport import MqttTransport
from edge_fl_broker.mosquitto import Mosquitto
from edge_fl_server.release import export
from edge_fl_server.release.export import ReleaseOrigin
from edge_fl_server.release.repository import Repository
from tests.conftest import Issue
from tests.devices.flash import cards
from tests.devices.scripted import TOPICS, ScriptedServer

DEVICE = "pi-07"
PER_CLASS = 12
SAMPLES = 2 * PER_CLASS
CHANNELS = ("ax", "ay", "az", "gx", "gy", "gz")
SERIES = InputSpec((6, 200), (0.0,) * 6, (1.0,) * 6, "CT", "float32", rate=50.0, hop=100, names=CHANNELS)
MOVEMENTS = [f"movement-{number}" for number in range(7)]
RECORDINGS = 6  # of each movement
RECORDING_VALUES = 500  # 10 s


def identity(issue: Issue, folder: Path) -> Path:
    """Make the folder with the device's identity."""
    folder.mkdir()
    for name, file in zip(("ca.crt", "client.crt", "client.key"), issue(DEVICE), strict=True):
        shutil.copyfile(file, folder / name)
        (folder / name).chmod(0o600)
    return folder


def pictures(folder: Path) -> Path:
    """Write two classes of pictures, red and blue ones, one folder each."""
    rng = np.random.default_rng(0)
    for name, channel in (("a", 0), ("b", 2)):
        (folder / name).mkdir(parents=True)
        for number in range(PER_CLASS):
            pixels = rng.integers(0, 60, (4, 4, 3))
            pixels[..., channel] += 190
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")
    return folder


def recordings(folder: Path) -> Path:
    """Write recordings of seven movements, sines of different frequencies in noise, one folder each."""
    time_s = np.arange(RECORDING_VALUES)[:, None] / SERIES.rate
    for movement, name in enumerate(MOVEMENTS):
        (folder / name).mkdir(parents=True)
        for number in range(RECORDINGS):
            rng = np.random.default_rng([movement, number])
            cycles = (movement + 1) / 2 * time_s + rng.random(SERIES.channels)
            x = np.sin(2 * np.pi * cycles) + rng.normal(0, 0.3, cycles.shape)
            header = ",".join(("time", *CHANNELS))
            table = np.hstack([time_s, x])
            np.savetxt(folder / name / f"{number}.csv", table, "%.4f", ",", header=header, comments="")
    return folder


def kernels() -> tuple[Manifest, bytes]:
    """Return the manifest and the extractor of a release of the default network of series."""
    model = with_pinned_weights(ModelConfig("random-kernels"))
    spec = MethodSpec(model, SERIES, MOVEMENTS, MethodConfig(PRETRAINED), seed=0)
    method = build_method(spec)
    manifest, payloads = export.release(method, steps.start(method), spec, ReleaseOrigin(1, "toy", 1))
    return manifest, payloads[manifest.extractor.sha256]


def backbone(folder: Path, size: int = 0) -> Repository:
    """Release the frozen EfficientNet-Lite0, with the weights of the extra [backbone]; size: pixels of a side of its input, 0: 224."""
    model = ModelConfig("efficientnet-lite0", {"size": size}, train="none")
    input = backbone_input(model)
    assert input is not None
    spec = MethodSpec(model, input, ["a", "b"], MethodConfig(PRETRAINED), seed=0)
    method = build_method(spec)
    manifest, payloads = export.release(method, steps.start(method), spec, ReleaseOrigin(1, "toy", 1))
    repository = Repository(folder)
    repository.artefacts.mkdir(parents=True, exist_ok=True)
    for sha256, payload in payloads.items():
        (repository.artefacts / sha256).write_bytes(payload)
    repository.publish(manifest)
    return repository


@contextmanager
def serving(broker: Mosquitto, issue: Issue, repository: Repository) -> Iterator[ScriptedServer]:
    """A server that assigns release 1 to the device, without its bytes: they are on the card."""
    with connected(broker, issue) as server:
        server.metadata(repository.files())
        server.assignment(DEVICE, "serve", run_id="toy", round=1, id="rel-1", release=1)
        yield server


@contextmanager
def connected(broker: Mosquitto, issue: Issue) -> Iterator[ScriptedServer]:
    """A server that is online, without a release."""
    ca, cert, key = issue("server")
    endpoint = Endpoint("127.0.0.1", broker.endpoint.port, ca, cert, key)
    server = ScriptedServer(partial(MqttTransport, endpoint))
    server.online()
    yield server
    server.leave()


def flash(card: Path, host: str, broker: Mosquitto, identity: Path, releases: Path) -> list[str]:
    """Return the flash command."""
    there = [
        "--host",
        host,
        "--port",
        str(broker.endpoint.port),
        "--fleet",
        TOPICS.fleet,
        "--identity",
        str(identity),
    ]
    there += ["--releases", str(releases)]
    return ["flash", "--id", DEVICE, "--boot", str(card), "--offline", *there]


def issued_for(python: str) -> dict[str, bytes]:
    """Return the boot partition of the OS release with this Python."""
    return {"3.11": cards.BOOKWORM, "3.13": cards.TRIXIE}[python]
