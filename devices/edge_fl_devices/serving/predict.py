"""Predict with the served model (extractor and personal head); needs no broker, torch or scikit-learn.

    from edge_fl_devices.serving.predict import Predictor
    Predictor("/var/lib/edge-fl").predict(images)   # uint8 [N, C, H, W] -> class names and probabilities

A predictor keeps the model it was created with, even when a running agent installs a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_fl.data import arrays, npz, pictures
from edge_fl.errors import DataError, InputError
from edge_fl.files.folder import UNREADABLE, unusable, walk
from edge_fl.inputs import InputSpec
from edge_fl_devices.features import drift
from edge_fl_devices.features.extractor import Extractor
from edge_fl_devices.serving.served_model import serving
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store

BATCH = 32
MAX_PICTURE_BYTES = 32 * 1024 * 1024
X_KEYS = ("x", "x_test", "x_train")
OnSkip = Callable[[Path, str], None]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A class and its probability; for an SVM the softmax of its margins, which is not calibrated."""

    name: str
    class_id: int
    label: str
    probability: float


class Predictor:
    """Loads the served model of a device's folder. Raises InputError when there is none, ArtefactError when it cannot run.

    With `remember` it stores the moments of the features it computes in the folder, where the agent checks them for drift.
    """

    def __init__(self, folder: Path | str, *, remember: bool = False) -> None:
        folder = Path(folder)
        self._remember = folder if remember else None
        model = serving(Store(folder), Slots(folder / "release"))
        if model is None:
            raise InputError(
                f"{folder}: no personal model in it, expected the folder of a device that has reported one"
            )
        self.manifest = model.installed.manifest
        self.extractor_path, self.head = model.installed.extractor, model.stored.head
        self._extractor = Extractor(self.extractor_path, self.manifest)
        self.head.require(self._extractor.sha256)

    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return probabilities [N, classes] of images uint8 [N, C, H, W]. Raises DataError for another shape."""
        expected = self.manifest.input.shape
        if images.dtype != np.uint8 or images.shape[1:] != expected:
            raise DataError(
                f"images {images.dtype} {list(images.shape)}, the extractor takes uint8 [N, {', '.join(map(str, expected))}]",
                consequence="nothing was predicted",
            )
        z = self._extractor.features(images)
        if self._remember and len(z):
            drift.remember_seen(self._remember, drift.moments(self.head.extractor, z))
        logits = self.head.logits(z)
        exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities: NDArray[np.float32] = exponents / exponents.sum(axis=1, keepdims=True)
        return probabilities

    def predict(self, images: NDArray[np.uint8]) -> list[tuple[str, float]]:
        """Return the most likely class name and its probability for each of the images uint8 [N, C, H, W]."""
        return [(best.label, best.probability) for best in self._named(images, [""] * len(images))]

    def read(self, source: Path, on_skip: OnSkip = lambda path, reason: None) -> Iterator[Prediction]:
        """Predict a picture, all pictures below a folder, or the images in an .npz. Raises DataError.

        on_skip: called for each picture or folder below a folder that cannot be read. Files without the suffix of a picture are ignored.
        """
        for names, images in _batches(source, self.manifest.input, on_skip):
            yield from self._named(images, names)

    def read_picture(self, name: str, payload: bytes) -> Prediction:
        """Predict from the bytes of a picture file. Raises DataError when they cannot be decoded."""
        try:
            image = pictures.decode(BytesIO(payload), self.manifest.input)
        except pictures.PictureError as error:
            raise DataError(_not_a_picture(f"{name}: {len(payload)} bytes", error)) from error
        return next(self._named(image[None], [name]))

    def _named(self, images: NDArray[np.uint8], names: list[str]) -> Iterator[Prediction]:
        for name, row in zip(names, self.probabilities(images), strict=True):
            best = int(row.argmax())
            yield Prediction(name, best, self.manifest.classes[best], float(row[best]))


def _not_a_picture(where: str, error: pictures.PictureError) -> str:
    reason = "" if error.reason == UNREADABLE else f" ({error.reason})"
    return f"{where}, not a picture that can be read{reason}"


def _batches(
    source: Path, input: InputSpec, on_skip: OnSkip
) -> Iterator[tuple[list[str], NDArray[np.uint8]]]:
    """Yield (names, images) in batches."""
    if not source.exists():
        raise DataError(
            f"{source}: no such file or folder; expected a picture, a folder of pictures, or an .npz"
        )
    files, is_folder = [source], source.is_dir()
    if is_folder:
        listing = walk(source)
        for path, reason in listing.skipped:
            on_skip(path, reason)
        files = [path for path in listing.files if path.suffix.lower() in pictures.SUFFIXES]
        if not files:
            raise DataError(f"{source}: no picture in it")
    elif reason := unusable(source):
        raise DataError(f"{source}: {reason}; expected a picture, a folder of pictures, or an .npz")
    elif source.suffix == ".npz":
        yield from _from_archive(source, input)
        return
    for start in range(0, len(files), BATCH):
        names, images = [], []
        for file in files[start : start + BATCH]:
            try:
                images.append(pictures.decode(file, input))
            except pictures.PictureError as error:
                if not is_folder:
                    raise DataError(_not_a_picture(str(file), error)) from error
                on_skip(file, error.reason)
            else:
                names.append(str(file))
        if images:
            yield names, np.stack(images)


def _from_archive(source: Path, input: InputSpec) -> Iterator[tuple[list[str], NDArray[np.uint8]]]:
    content = npz.read(source)
    key = next((key for key in X_KEYS if key in content), None)
    if key is None:
        raise DataError(f"{source}: holds {', '.join(content) or 'nothing'}, expected {' or '.join(X_KEYS)}")
    images = arrays.pixels(content[key], f"{source} ({key})")
    for start in range(0, len(images), BATCH):
        batch = images[start : start + BATCH]
        names = [f"{source.name}[{start + row}]" for row in range(len(batch))]
        yield names, pictures.fit(batch, input, source)
