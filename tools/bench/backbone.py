"""A backbone on a device: its features, and `device predict` on folders of pictures, against plain programs of onnxruntime and Pillow."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from PIL import Image

from edge_fl import heads
from edge_fl.blob import split
from edge_fl.config import ModelConfig
from edge_fl.data.partition import DataConfig
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.modalities import scaled
from edge_fl.release.manifests import Manifest
from edge_fl.wire.messages import Report
from edge_fl_devices.agent.outbox import Parcel
from edge_fl_devices.features.extractor import Extractor, usable_cores
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store, StoredHead
from edge_fl_server.recipes.recipe import Recipe
from edge_fl_server.release.export import ReleaseOrigin, release
from edge_fl_server.training.studies import without_data
from tools.bench.figures import PLAIN, Figure
from tools.bench.measure import take_turns

CLASSES = ["cat", "dog", "horse"]
IMAGES = 32
PICTURES = 120
PHOTO, SMALL = (4000, 3000), (96, 96)
KINDS = {"photos of 12 megapixels": PHOTO, "pictures of 96 pixels": SMALL}
OURS = "ours"

PLAIN_PROGRAM = """
import sys
from pathlib import Path
import numpy as np
import onnxruntime
from PIL import Image, ImageOps

def pixels(path):
    with Image.open(path) as picture:
        picture.draft("RGB", (2 * 224, 2 * 224))
        upright = ImageOps.exif_transpose(picture).convert("RGB")
        fitted = ImageOps.fit(upright, (224, 224), Image.Resampling.LANCZOS)
        return np.asarray(fitted, np.float32).transpose(2, 0, 1)[None] / 255

model, folder, weights = sys.argv[1:]
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
name, head = session.get_inputs()[0].name, np.load(weights)
for path in sorted(Path(folder).iterdir()):
    (features,) = session.run(None, {name: pixels(path)})
    logits = features[0] @ head
    print(path, logits.argmax(), np.exp(logits).max() / np.exp(logits).sum())
"""
"""Without threads that decode; a JPEG is decoded at a fraction of its size, as edge-fl does."""


def extraction(turns: int) -> Figure:
    """Features of images in memory: the device's extractor against an onnxruntime session with its own defaults, image by image."""
    with served() as (folder, manifest):
        model = Slots(folder / "release").current()
        assert model
        extractor, threads = Extractor(model.extractor, manifest), usable_cores()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(model.extractor, options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        images = np.random.default_rng(0).integers(0, 256, (IMAGES, *manifest.input.shape), np.uint8)
        floats = scaled(images)

        def plain() -> NDArray[np.float32]:
            return np.concatenate([session.run(None, {name: floats[i : i + 1]})[0] for i in range(IMAGES)])

        def ours() -> NDArray[np.float32]:
            return extractor.features(images)

        difference = float(np.abs(plain() - ours()).max())
        times = take_turns({PLAIN: plain, OURS: ours}, turns)
    per_image = {f"{side}, ms per image": 1000 * times[side].least / IMAGES for side in (PLAIN, OURS)}
    return Figure(
        "D1",
        f"features of EfficientNet-Lite0 at 224, {threads} threads, against onnxruntime",
        target=round(1 / 1.1, 2),
        sides=times,
        ours=OURS,
        difference=difference,
        tolerance=1e-4,
        notes=dict(per_image),
    )


def prediction(kind: str, turns: int) -> Figure:
    """The command `device predict` on a folder of pictures against the plain program, both with their start."""
    with served() as (folder, _), TemporaryDirectory(prefix="edge-fl-bench-") as album:
        pictures(Path(album), KINDS[kind])
        model = Slots(folder / "release").current()
        assert model
        weights = folder / "head.npy"
        np.save(weights, np.ones((model.manifest.feature_dim, len(CLASSES)), np.float32))
        sides: dict[str, Callable[[], object]] = {
            PLAIN: _run("-c", PLAIN_PROGRAM, str(model.extractor), album, str(weights)),
            OURS: _run("-m", "edge_fl", "device", "predict", album, "--dir", str(folder)),
        }
        times = take_turns(sides, turns)
    per_second = {f"{side}, pictures a second": PICTURES / times[side].least for side in sides}
    return Figure(
        "D2",
        f"predict {PICTURES} {kind}, against onnxruntime and Pillow",
        target=0.7,
        sides=times,
        ours=OURS,
        notes=dict(per_second),
    )


LITE0 = ModelConfig("efficientnet-lite0", weights="random")  # takes as long as with real weights


def released(classes: list[str], model: ModelConfig = LITE0) -> tuple[Manifest, dict[str, bytes]]:
    """A release of a backbone."""
    _, spec = without_data(Recipe(source="none", data=DataConfig(classes=classes), model=model))
    method = build_method(spec)
    return release(method, steps.start(method), spec, ReleaseOrigin(1, "bench", round=0))


@contextmanager
def served() -> Iterator[tuple[Path, Manifest]]:
    """A device's folder with EfficientNet-Lite0 and a head."""
    manifest, payloads = released(CLASSES)
    with TemporaryDirectory(prefix="edge-fl-bench-") as place:
        folder = Path(place)
        slots, blob = Slots(folder / "release"), manifest.extractor
        slots.prepare(manifest)
        for index, chunk in enumerate(split(payloads[blob.sha256], blob.chunk_bytes)):
            slots.sink(blob).add(index, bytes(chunk))
        slots.install(manifest)
        z = np.random.default_rng(0).normal(size=(30, manifest.feature_dim)).astype(np.float32)
        head = heads.fit(
            "nearest", z, np.arange(30) % len(CLASSES), len(CLASSES), unit_norm=False, extractor=blob.sha256
        )
        parcel = Parcel("bench", 1, Report("rel-1", "head", "boot", 30, {}), 60)
        Store(folder).keep_head(StoredHead(head, 1, parcel))
        yield folder, manifest


def pictures(folder: Path, size: tuple[int, int]) -> None:
    """JPEG pictures of smooth noise; photos are copies of six, since only decoding counts."""
    rng = np.random.default_rng(0)
    different: list[bytes] = []
    for number in range(6):
        rough = Image.fromarray(rng.integers(0, 256, (24, 32, 3), np.uint8))
        rough.resize(size, Image.Resampling.BICUBIC).save(folder / f"{number:03}.jpg", quality=90)
        different.append((folder / f"{number:03}.jpg").read_bytes())
    for number in range(6, PICTURES):
        (folder / f"{number:03}.jpg").write_bytes(different[number % 6])


def _run(*arguments: str) -> Callable[[], object]:
    def run() -> None:
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)

    return run
