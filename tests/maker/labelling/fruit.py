"""Drawn pictures of fruit, a release with a small extractor for them, and a device that has both."""

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from edge_fl.blob import describe, split
from edge_fl.inputs import InputSpec
from edge_fl.release.manifests import Canary, Manifest, canary_input
from edge_fl.wire.transport import JSON
from edge_fl_devices.config import CaptureConfig, DeviceConfig
from edge_fl_devices.storage.slots import Slots
from edge_fl_maker.access import HEADER, HttpAccess
from edge_fl_maker.capture.pools import Pool
from edge_fl_maker.http_server import Service
from edge_fl_maker.labelling.serve import labelling
from edge_fl_maker.labelling.session import LabelSession, View
from tests.devices import graphs

CLASSES = ["apple", "banana", "blueberry", "carrot", "leaf", "plum"]
COLOURS = [(200, 45, 40), (232, 200, 50), (50, 70, 150), (235, 120, 30), (70, 150, 60), (110, 45, 110)]
INPUT = InputSpec((3, 12, 12), resize="stretch")
DIM = 128
CAPTURE = CaptureConfig()


def fruit(label: int, seed: int, size: tuple[int, int] = (240, 180)) -> bytes:
    """A PNG of a fruit on a background of soft spots; the colour varies so much that some fruits look alike."""
    rng = np.random.default_rng([label, seed])
    height = size[1]
    spots = Image.fromarray(rng.integers(110, 200, (5, 6, 1)).repeat(3, axis=2).astype(np.uint8))
    picture = spots.resize(size, Image.Resampling.BICUBIC)
    colour = tuple(int(c) for c in np.clip(COLOURS[label] + rng.normal(0, 18, 3), 0, 255))
    x, y = rng.uniform(0.42, 0.58, 2) * size
    radius = rng.uniform(0.28, 0.4) * height
    layer = Image.new("RGBA", size)
    draw = ImageDraw.Draw(layer)
    if label == 1:
        draw.arc(
            (x - radius, y - 1.4 * radius, x + radius, y + 0.6 * radius),
            20,
            160,
            (*colour, 255),
            int(radius / 2),
        )
    elif label == 3:
        draw.polygon(
            [(x - radius, y - radius / 2), (x - radius, y + radius / 2), (x + radius, y)], (*colour, 255)
        )
    else:
        flat = {4: 0.5, 5: 0.8}.get(label, 1.0)
        draw.ellipse((x - radius, y - flat * radius, x + radius, y + flat * radius), (*colour, 255))
    soft = layer.filter(ImageFilter.GaussianBlur(1.5))
    picture.paste(soft, mask=soft)
    buffer = BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def name_of(picture: bytes) -> str:
    """The picture's name in the pool."""
    return hashlib.sha256(picture).hexdigest()[:16] + ".png"


def manifest(
    classes: list[str] = CLASSES, input: InputSpec = INPUT, **changes: Any
) -> tuple[Manifest, bytes]:
    """A release whose features are random combinations of a sample's values, of pictures 12 x 12 pixels, rectified."""
    weights = np.random.default_rng(0).normal(size=(int(np.prod(input.shape)), DIM)).astype(np.float32)
    nodes = [graphs.helper.make_node("Relu", ["z"], ["features"])]
    payload = graphs.graph(nodes, weights=weights, input_shape=("n", *input.shape), output_shape=("n", DIM))
    question = Canary(seed=5, images=2, features=[])
    expected = np.maximum(canary_input(question, input).reshape(2, -1) @ weights, 0)
    fields = {"classes": classes, "input": input, "feature_dim": DIM, "extractor": describe(payload, 65536)}
    return graphs.manifest_for(payload, expected=expected, **(fields | changes)), payload


def install(home: Path, release: Manifest, payload: bytes) -> None:
    """Install a release as the agent does."""
    slots = Slots(home / "release")
    slots.prepare(release)
    for index, chunk in enumerate(split(payload, release.extractor.chunk_bytes)):
        slots.sink(release.extractor).add(index, bytes(chunk))
    slots.install(release)


def device(folder: Path, release: tuple[Manifest, bytes] | None = None, **changes: Any) -> DeviceConfig:
    """The settings of a device in `folder`, which has the release, no label and no head."""
    home = folder / "pi"
    install(home, *(release or manifest()))
    config = DeviceConfig("pi", f"folder:{folder / 'images'}", folder=str(home), capture=CAPTURE)
    return msgspec.structs.replace(config, **changes)


def fill(config: DeviceConfig, per_class: int, seed: int = 0) -> dict[str, str]:
    """Add pictures to the pool -> their classes by name."""
    pool = Pool(Path(config.folder) / "unlabelled", config.capture)
    truth = {}
    for label, number in np.ndindex(len(CLASSES), per_class):
        picture = fruit(label, seed + number)
        assert pool.add(picture, f"camera {label}-{seed + number}").name == name_of(picture)
        truth[name_of(picture)] = CLASSES[label]
    return truth


@dataclass
class Desk:
    """A running service with its label page."""

    service: Service
    session: LabelSession
    config: DeviceConfig

    @property
    def home(self) -> str:
        return f"http://127.0.0.1:{self.service.port}"

    @property
    def images(self) -> Path:
        return Path(self.config.data.removeprefix("folder:"))

    def learned(self, deadline_s: float = 90.0) -> View:
        """Wait until everything is learned -> what the page then shows."""
        ends_s = time.monotonic() + deadline_s
        while (view := self.session.view("waiting")).busy:
            assert time.monotonic() < ends_s
            time.sleep(0.01)
        return view

    def request(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """Send a request as the page does -> status, JSON or bytes, headers."""
        connection = HTTPConnection("127.0.0.1", self.service.port, timeout=60)
        payload = body if isinstance(body, bytes | None) else msgspec.json.encode(body)
        try:
            connection.request(method, path, payload, {HEADER: "label"} | headers)
            answer = connection.getresponse()
            content, kind = answer.read(), answer.getheader("Content-Type")
            return (
                answer.status,
                msgspec.json.decode(content) if kind == JSON else content,
                dict(answer.getheaders()),
            )
        finally:
            connection.close()

    def act(self, what: str, client: str = "me", **body: str) -> tuple[int, Any]:
        """Send an action of a client -> status and answer."""
        status, answer, _ = self.request("POST", f"/api/label/{what}", {"client": client, **body})
        return status, answer


@contextmanager
def desk(config: DeviceConfig, access: HttpAccess | None = None) -> Iterator[Desk]:
    """Serve a device's folder until the block ends."""
    with (
        Service(Path(config.folder), access=access, optional=True) as service,
        labelling(service, config) as session,
    ):
        thread = threading.Thread(target=service.run)
        thread.start()
        try:
            yield Desk(service, session, config)
        finally:
            service.stop()
            thread.join(60)
