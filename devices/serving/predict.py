"""Predicting with the pair that the device serves, extractor and personal head: no broker, no torch, no scikit-learn.

    from devices.serving.predict import Predictor
    Predictor("/var/lib/edge-fl").predict(images)   # uint8 [N, C, H, W] -> class names and probabilities

The pair is read once, when the predictor is made; a running agent may replace it meanwhile, both stay usable.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from devices.data import pictures
from devices.features import drift
from devices.features.extractor import Extractor
from devices.serving.served_model import serving
from devices.storage.slots import Slots
from devices.storage.store import Store
from edge_fl.config import InputSpec
from edge_fl.data import arrays, npz
from edge_fl.errors import DataError, InputError

BATCH = 32
MAX_PICTURE_BYTES = 32 * 1024 * 1024
X_KEYS = ("x", "x_test", "x_train")


@dataclass(frozen=True, slots=True)
class Prediction:
    """A class and the head's probability for it; an SVM's is a soft maximum of its margins, not calibrated."""

    name: str
    class_id: int
    label: str
    probability: float


class Predictor:
    """The pair below a device's folder. Raises InputError when there is none yet, ArtefactError when it cannot run.

    With `remember` the moments of what it sees are kept in the folder, where the agent looks for drift.
    """

    def __init__(self, folder: Path | str, *, remember: bool = False) -> None:
        folder = Path(folder)
        self._remember = folder if remember else None
        pair = serving(Store(folder), Slots(folder / "release"))
        if pair is None:
            raise InputError(
                f"{folder}: no personal model in it, expected the folder of a device that has reported one"
            )
        self.manifest = pair.installed.manifest
        self.extractor_path, self.head = pair.installed.extractor, pair.stored.head
        self._extractor = Extractor(self.extractor_path, self.manifest)
        self.head.require(self._extractor.sha256)

    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Images uint8 [N, C, H, W] -> probabilities [N, classes]. Raises DataError for images of another shape."""
        expected = self.manifest.input.shape
        if images.dtype != np.uint8 or images.shape[1:] != expected:
            raise DataError(
                f"images {images.dtype} {list(images.shape)}, the extractor takes uint8 [N, {', '.join(map(str, expected))}];"
                " nothing was predicted"
            )
        z = self._extractor.features(images)
        if self._remember and len(z):
            drift.remember_seen(self._remember, drift.moments(self.head.extractor, z))
        logits = self.head.logits(z)
        exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities: NDArray[np.float32] = exponents / exponents.sum(axis=1, keepdims=True)
        return probabilities

    def predict(self, images: NDArray[np.uint8]) -> list[tuple[str, float]]:
        """Images uint8 [N, C, H, W] -> the likeliest class's name and its probability, for each."""
        return [(found.label, found.probability) for found in self._named(images, [""] * len(images))]

    def read(self, source: Path) -> Iterator[Prediction]:
        """Predictions for a picture, all pictures below a folder, or the images in an .npz. Raises DataError."""
        for names, images in _batches(source, self.manifest.input):
            yield from self._named(images, names)

    def read_picture(self, name: str, payload: bytes) -> Prediction:
        """The prediction for a picture file's bytes. Raises DataError when they are no picture."""
        image = pictures.decode(BytesIO(payload), self.manifest.input)
        if image is None:
            raise DataError(f"{name}: {len(payload)} bytes that are no picture")
        return next(self._named(image[None], [name]))

    def _named(self, images: NDArray[np.uint8], names: list[str]) -> Iterator[Prediction]:
        for name, row in zip(names, self.probabilities(images), strict=True):
            best = int(row.argmax())
            yield Prediction(name, best, self.manifest.classes[best], float(row[best]))


def _batches(source: Path, input: InputSpec) -> Iterator[tuple[list[str], NDArray[np.uint8]]]:
    """Images a few at a time, each with a name."""
    if source.suffix == ".npz":
        yield from _from_archive(source)
        return
    if not source.exists():
        raise DataError(
            f"{source}: no such file or folder; expected a picture, a folder of pictures, or an .npz"
        )
    found = source.is_dir()
    files = (
        sorted(path for path in source.rglob("*") if path.suffix.lower() in pictures.SUFFIXES)
        if found
        else [source]
    )
    if not files:
        raise DataError(f"{source}: no picture in it")
    for start in range(0, len(files), BATCH):
        names, images = [], []
        for file in files[start : start + BATCH]:
            image = pictures.decode(file, input)
            if image is None and not found:
                raise DataError(f"{file}: not a picture that can be read")
            if image is not None:
                names.append(str(file))
                images.append(image)
        if images:
            yield names, np.stack(images)


def _from_archive(source: Path) -> Iterator[tuple[list[str], NDArray[np.uint8]]]:
    held = npz.read(source)
    key = next((key for key in X_KEYS if key in held), None)
    if key is None:
        raise DataError(f"{source}: holds {', '.join(held) or 'nothing'}, expected {' or '.join(X_KEYS)}")
    images = arrays.pixels(held[key], f"{source} ({key})")
    for start in range(0, len(images), BATCH):
        batch = images[start : start + BATCH]
        yield [f"{source.name}[{start + row}]" for row in range(len(batch))], batch
