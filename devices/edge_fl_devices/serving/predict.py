"""Predict with the served model (extractor and personal head); needs no broker, torch or scikit-learn.

    from edge_fl_devices.serving.predict import Predictor
    Predictor("/var/lib/edge-fl").predict(images)   # uint8 [N, C, H, W] -> class names and probabilities

A predictor keeps the model it was created with, even when a running agent installs a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_fl.errors import DataError, InputError
from edge_fl.files import npz
from edge_fl.files.folder import unusable, walk
from edge_fl.files.paths import text
from edge_fl.heads import wording
from edge_fl.heads.fleet import Adapted
from edge_fl.heads.head import Head
from edge_fl.heads.probability_calibration import Calibration
from edge_fl.inputs import InputSpec
from edge_fl.modalities import ABOUT, UnusableFileError, pictures
from edge_fl.threads import ahead
from edge_fl_devices.data.record import Skipped, named
from edge_fl_devices.features import drift
from edge_fl_devices.features.extractor import Extractor, Features
from edge_fl_devices.serving.served_model import head_words, measured, predicting
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import ImmediateHead, Store

BATCH = 8  # pictures decoded while the extractor works on as many; the first results come after them
MAX_FILE_BYTES = 32 * 1024 * 1024
NOTHING_PREDICTED = "nothing was predicted"
X_KEYS = ("x", "x_test", "x_train")
Status = Literal["answered", "unsure", "unknown"]
OnSkip = Callable[[Path, str], None]
OnRemark = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ClassCandidate:
    """A class and its calibrated probability."""

    class_id: int
    label: str
    probability: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for one picture: the same fields from the command, over HTTP and in Python.

    status: "answered"; "unsure": the probability is below the threshold of the target precision; "unknown": the picture is further from the
    labelled ones than the false alarm rate allows. Unless answered, `class_id` and `label` are None; `top` holds the best classes in any
    case, and `probability` is that of the best. distance: the share of the labelled pictures that are nearer to the others than this one.
    """

    name: str
    class_id: int | None
    label: str | None
    probability: float
    status: Status
    distance: float
    top: tuple[ClassCandidate, ...]

    @property
    def text(self) -> str:
        """The class, or why there is none."""
        return self.status if self.label is None else self.label


class Predictor:
    """Loads the served model of a device's folder. Raises InputError when there is none, ArtefactError when it cannot run.

    With `remember` it stores the moments of the features it computes in the folder, where the agent checks them for drift. `top` is the
    number of classes in a prediction. `min_precision` and `false_alarm` are those of the device's settings unless given; the probability
    that reaches the precision, or why none does, is `threshold`. `extractor` is used if it is that of the served model, which saves loading
    it again. 16-bit pictures are scaled like those that the head was fitted on: from `bits`.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        remember: bool = False,
        top: int = 1,
        min_precision: float | None = None,
        false_alarm: float | None = None,
        extractor: Extractor | None = None,
    ) -> None:
        folder = Path(folder)
        self.top = top
        self._remember = folder if remember else None
        store = Store(folder)
        found = predicting(store, Slots(folder / "release"))
        if found is None:
            raise InputError(
                f"{text(folder)}: no personal model in it, expected the folder of a device that has reported one"
            )
        self.installed, fitted = found
        self.manifest, self.extractor_path = self.installed.manifest, self.installed.extractor
        self.head, self.calibration, self.bits = fitted.head, fitted.calibration, fitted.bits
        self.immediate = fitted if isinstance(fitted, ImmediateHead) else None
        self.accuracy, self.head_words = measured(fitted), head_words(fitted)
        self.contradiction = wording.contradiction(fitted.calibration, self.manifest.classes)
        answers = store.answers()
        self.min_precision = answers.min_precision if min_precision is None else min_precision
        self.threshold = self.calibration.threshold(self.min_precision)
        self._furthest = 1 - (answers.false_alarm if false_alarm is None else false_alarm)
        if _knows_more_than_the_labels(self.head, self.calibration):
            self._furthest = 1.0
        if extractor is None or extractor.sha256 != self.manifest.extractor.sha256:
            extractor = Extractor(self.extractor_path, self.manifest)
        self.extractor = extractor
        self.head.require(extractor.sha256)

    @property
    def words(self) -> str:
        """What the head is and its accuracy on the device's own labels, and whether these contradict the fleet's head."""
        said = f"{self.head_words}; accuracy: {self.accuracy.words}"
        return f"{said}; {self.contradiction}" if self.contradiction else said

    def probabilities(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return calibrated probabilities [N, classes] of images uint8 [N, C, H, W]. Raises DataError for another shape."""
        return self._probabilities(self._features(images))

    def _probabilities(self, z: Features) -> NDArray[np.float32]:
        return self.calibration.probabilities(self.head.logits(z))

    def _features(self, images: NDArray[np.uint8]) -> Features:
        expected = self.manifest.input.shape
        if images.dtype != np.uint8 or images.shape[1:] != expected:
            raise DataError(
                f"images {images.dtype} {list(images.shape)}, the extractor takes uint8 [N, {', '.join(map(str, expected))}]",
                consequence=NOTHING_PREDICTED,
            )
        z = self.extractor.features(images)
        if self._remember and len(z):
            drift.remember_seen(self._remember, drift.moments(self.head.extractor, z))
        return z

    def predict(self, images: NDArray[np.uint8]) -> list[tuple[str, float]]:
        """Return the most likely class name and its probability for each of the images uint8 [N, C, H, W]."""
        found = self._named(images, [""] * len(images))
        return [(each.top[0].label, each.top[0].probability) for each in found]

    def predictions(self, images: NDArray[np.uint8], names: Sequence[str] = ()) -> list[Prediction]:
        """Predict images uint8 [N, C, H, W], each under its name, by default its number."""
        return list(self._named(images, names or [str(row) for row in range(len(images))]))

    def read(
        self,
        source: Path,
        on_skip: OnSkip = lambda path, reason: None,
        on_remark: OnRemark = lambda remark: None,
    ) -> Iterator[Prediction]:
        """Predict a picture, all pictures below a folder, or the images in an .npz. Raises DataError.

        on_skip: called for each picture or folder below a folder that cannot be read. on_remark: called with what else was left out. Files
        without the suffix of a picture are ignored.
        """
        for names, images in _batches(source, self.manifest.input, self.bits, on_skip, on_remark):
            yield from self._named(images, names)

    def read_file(self, name: str, payload: bytes, top: int | None = None) -> list[Prediction]:
        """Predict the samples in the bytes of a file, with `top` classes instead of the predictor's.

        Raises DataError when they cannot be decoded.
        """
        try:
            image = pictures.decode(BytesIO(payload), self.manifest.input, bits=self.bits)
        except UnusableFileError as error:
            raise DataError(f"{name}: {len(payload)} bytes, {error.words}", NOTHING_PREDICTED) from error
        return list(self._named(image[None], [name], top))

    def _named(
        self, images: NDArray[np.uint8], names: Sequence[str], top: int | None = None
    ) -> Iterator[Prediction]:
        yield from self.from_features(self._features(images), names, top)

    def from_features(
        self, z: Features, names: Sequence[str], top: int | None = None
    ) -> Iterator[Prediction]:
        """Predict from features z [N, d], each under its name, with `top` classes instead of the predictor's."""
        rows = zip(names, self._probabilities(z), self.calibration.percentiles(z), strict=True)
        for name, probabilities, distance in rows:
            yield self._prediction(name, float(distance), probabilities, top)

    def of_file(self, z: Features, name: str, top: int | None = None) -> Prediction:
        """Predict all samples z [n, d] of a file as one, by the means of their probabilities and distances."""
        probabilities, distances = self._probabilities(z), self.calibration.percentiles(z)
        return self._prediction(name, float(distances.mean()), probabilities.mean(axis=0), top)

    def _prediction(
        self, name: str, distance: float, probabilities: NDArray[np.float32], most: int | None
    ) -> Prediction:
        order = np.argsort(-probabilities, kind="stable")[: most or self.top]
        top = tuple(
            ClassCandidate(int(id), self.manifest.classes[id], float(probabilities[id])) for id in order
        )
        best, status = top[0], self._status(top[0].probability, distance)
        if status == "answered":
            return Prediction(name, best.class_id, best.label, best.probability, status, distance, top)
        return Prediction(name, None, None, best.probability, status, distance, top)

    def _status(self, probability: float, distance: float) -> Status:
        if distance > self._furthest:
            return "unknown"
        return "answered" if probability >= self.threshold.probability else "unsure"


def _knows_more_than_the_labels(head: Head, calibration: Calibration) -> bool:
    """Whether the fleet's head knows classes without own labels, whose pictures are far from the labelled ones, and right all the same."""
    if not len(calibration.fleet):
        return False
    possible = len(head.present) if isinstance(head, Adapted) else head.classes
    return possible > len(calibration.means)


class _Batch(NamedTuple):
    """Decoded pictures with their names, and skipped files with the error."""

    names: list[str]
    images: list[NDArray[np.uint8]]
    skipped: list[tuple[Path, UnusableFileError]]


def _batches(
    source: Path, input: InputSpec, bits: int, on_skip: OnSkip, on_remark: OnRemark
) -> Iterator[tuple[list[str], NDArray[np.uint8]]]:
    """Yield (names, images) in batches."""
    if not source.exists():
        raise DataError(
            f"{text(source)}: no such file or folder; expected a picture, a folder of pictures, or an .npz"
        )
    files, is_folder = [source], source.is_dir()
    if is_folder:
        listing = walk(source)
        for path, reason in listing.skipped:
            on_skip(path, reason)
        if listing.system_remark:
            on_remark(listing.system_remark)
        files = [path for path in listing.files if path.suffix.lower() in ABOUT["picture"].suffixes]
        if not files:
            raise DataError(f"{text(source)}: no picture in it")
    elif reason := unusable(source):
        raise DataError(f"{text(source)}: {reason}; expected a picture, a folder of pictures, or an .npz")
    elif source.suffix == ".npz":
        yield from _from_archive(source, input)
        return
    count, unused = 0, Skipped()
    for names, images, skipped in ahead(_decoded(files, input, bits, is_folder=is_folder)):
        for path, error in skipped:
            on_skip(path, error.words)
            unused.add(path, error.reason, error.detail, root=source)
        if images:
            count += len(images)
            yield names, np.stack(images)
    if not count:
        why = "; ".join(named(reason, number, unused.names[reason]) for reason, number in unused.items())
        raise DataError(f"{text(source)}: no picture in it can be read ({why})")


def _decoded(files: Sequence[Path], input: InputSpec, bits: int, *, is_folder: bool) -> Iterator[_Batch]:
    """Decode pictures, one at a time; of a folder those that cannot be read are skipped."""
    for start in range(0, len(files), BATCH):
        batch = _Batch([], [], [])
        for file in files[start : start + BATCH]:
            try:
                batch.images.append(pictures.decode(file, input, bits=bits))
            except UnusableFileError as error:
                if not is_folder:
                    raise DataError(error.message, NOTHING_PREDICTED) from error
                batch.skipped.append((file, error))
            else:
                batch.names.append(text(file))
        yield batch


def _from_archive(source: Path, input: InputSpec) -> Iterator[tuple[list[str], NDArray[np.uint8]]]:
    content = npz.read(source)
    key = next((key for key in X_KEYS if key in content), None)
    if key is None:
        raise DataError(
            f"{text(source)}: holds {', '.join(content) or 'nothing'}, expected {' or '.join(X_KEYS)}"
        )
    images = pictures.arrays(content[key], f"{text(source)} ({key})")
    for start in range(0, len(images), BATCH):
        batch = images[start : start + BATCH]
        names = [f"{text(source.name)}[{start + row}]" for row in range(len(batch))]
        yield names, pictures.fit(batch, input, source)
