"""Predict with the served model (extractor and personal head); needs no broker, torch or scikit-learn.

    from edge_fl_devices.serving.predict import Predictor
    Predictor("/var/lib/edge-fl").predict(x)   # samples [N, ...] -> class names and probabilities

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

from edge_fl import modalities
from edge_fl.errors import DataError, InputError
from edge_fl.files import npz
from edge_fl.files.folder import unusable, walk
from edge_fl.files.npz import Array
from edge_fl.files.paths import text
from edge_fl.heads import wording
from edge_fl.inputs import InputSpec
from edge_fl.modalities import ABOUT, UnusableFileError, kind_of
from edge_fl.threads import ahead
from edge_fl_devices.data.record import Skipped, named, quality
from edge_fl_devices.features import drift
from edge_fl_devices.features.extractor import Extractor, Features
from edge_fl_devices.serving.served_model import head_words, measured, predicting
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import ImmediateHead, Store

BATCH = 8  # samples read while the extractor works on as many; the first results come after them
PIECE = 64  # samples of a long recording in a batch
MAX_FILE_BYTES = 32 * 1024 * 1024
DEFAULT_PROMISE = 0.9
"""Share of all samples whose class is in the prediction set where no promise is asked for."""
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
    """The prediction for one sample: the same fields from the command, over HTTP and in Python.

    possible: the prediction set, the most probable class first; it has the right one for a share `promise` of all samples.
    status: "answered"; "unsure": a promise was asked for, and the set has several classes; "unknown": the sample is further from the
    labelled ones than the false alarm rate allows. Unless answered, `class_id` and `label` are None; `top` holds the best classes in any
    case, and `probability` is that of the best. distance: the share of the labelled samples that are nearer to the others than this one; 0
    if the best class has no label.
    """

    name: str
    class_id: int | None
    label: str | None
    probability: float
    status: Status
    distance: float
    top: tuple[ClassCandidate, ...]
    possible: tuple[str, ...]
    promise: float

    @property
    def text(self) -> str:
        """The class, or why there is none."""
        return self.status if self.label is None else self.label


class Predictor:
    """Loads the served model of a device's folder. Raises InputError when there is none, ArtefactError when it cannot run.

    With `remember` it stores the moments of the features it computes in the folder, where the agent checks them for drift. `top` is the
    number of classes in a prediction. `promise` and `false_alarm` are those of the device's settings unless given; without a promise every
    sample is answered, and prediction sets are for DEFAULT_PROMISE. The distance above which a sample is unknown is `furthest`. `extractor`
    is used if it is that of the served model, which saves loading it again. 16-bit pictures are scaled like those that the head was fitted
    on: from `bits`.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        remember: bool = False,
        top: int = 1,
        promise: float | None = None,
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
        expected = self.accuracy.forecast
        weakest = wording.weakest_class(fitted.calibration, self.manifest.classes)
        self.forecast = "; ".join(filter(None, (expected.words if expected else "", weakest)))
        answers = store.answers()
        self.promise = answers.promise if promise is None else promise
        self.furthest = 1 - (answers.false_alarm if false_alarm is None else false_alarm)
        if extractor is None or extractor.sha256 != self.manifest.extractor.sha256:
            extractor = Extractor(self.extractor_path, self.manifest)
        self.extractor = extractor
        self.head.require(extractor.sha256)

    @property
    def words(self) -> str:
        """What the head is and its accuracy on the device's own labels, and whether these contradict the fleet's head."""
        said = f"{self.head_words}; accuracy: {self.accuracy.words}"
        return f"{said}; {self.contradiction}" if self.contradiction else said

    def probabilities(self, x: Array) -> NDArray[np.float32]:
        """Return calibrated probabilities [N, classes] of samples [N, ...]. Raises DataError for another shape or dtype."""
        return self.calibration.probabilities(self.head.logits(self._features(x)))

    def _features(self, x: Array) -> Features:
        input = self.manifest.input
        if x.dtype != input.dtype or x.shape[1:] != input.shape:
            raise DataError(
                f"{ABOUT[input.kind].samples} {x.dtype} {list(x.shape)}, the extractor takes {input.dtype}"
                f" [N, {', '.join(map(str, input.shape))}]",
                consequence=NOTHING_PREDICTED,
            )
        z = self.extractor.features(x)
        if self._remember and len(z):
            drift.remember_seen(self._remember, drift.moments(self.head.extractor, z))
        return z

    def predict(self, x: Array) -> list[tuple[str, float]]:
        """Return the most likely class name and its probability for each of the samples [N, ...]."""
        return [(each.top[0].label, each.top[0].probability) for each in self.predictions(x)]

    def predictions(self, x: Array, names: Sequence[str] = ()) -> list[Prediction]:
        """Predict samples [N, ...], each under its name, by default its number."""
        return list(self.from_features(self._features(x), names or [str(row) for row in range(len(x))]))

    def read(
        self,
        source: Path,
        on_skip: OnSkip = lambda path, reason: None,
        on_remark: OnRemark = lambda remark: None,
    ) -> Iterator[Prediction]:
        """Predict a file, all files below a folder, or the samples in an .npz. Raises DataError.

        on_skip: called for each file or folder below a folder that cannot be read. on_remark: called with remarks on the quality of a file,
        and with what else was left out. Files without a suffix of the extractor's kind are ignored.
        """
        for names, x in _batches(source, self.manifest.input, self.bits, on_skip, on_remark):
            yield from self.from_features(self._features(x), names)

    def read_file(self, name: str, payload: bytes, top: int | None = None) -> list[Prediction]:
        """Predict the samples in the bytes of a file, with `top` classes instead of the predictor's.

        Raises DataError when they cannot be read.
        """
        input = self.manifest.input
        try:
            x = modalities.of(input.kind).read(BytesIO(payload), input, bits=self.bits).samples
        except UnusableFileError as error:
            raise DataError(f"{name}: {len(payload)} bytes, {error.words}", NOTHING_PREDICTED) from error
        return list(self.from_features(self._features(x), names_of(name, len(x), input), top))

    def from_features(
        self, z: Features, names: Sequence[str], top: int | None = None
    ) -> Iterator[Prediction]:
        """Predict from features z [N, d], each under its name, with `top` classes instead of the predictor's."""
        logits, found = self.head.logits(z), self.calibration
        sets, shares = found.promise.sets(logits, self._set_promise), found.probabilities(logits)
        rows = zip(names, found.percentiles(z, shares.argmax(axis=1)), shares, sets, strict=True)
        for name, distance, probabilities, possible in rows:
            yield self._prediction(name, float(distance), probabilities, possible, top)

    def of_file(self, z: Features, name: str, top: int | None = None) -> Prediction:
        """Predict all samples z [n, d] of a file as one, by the means of their probabilities and distances."""
        logits, found = self.head.logits(z), self.calibration
        possible, shares = found.promise.of_mean(logits, self._set_promise), found.probabilities(logits)
        distance = float(found.percentiles(z, shares.argmax(axis=1)).mean())
        return self._prediction(name, distance, shares.mean(axis=0), possible, top)

    def _prediction(
        self,
        name: str,
        distance: float,
        probabilities: NDArray[np.float32],
        possible: NDArray[np.bool_],
        most: int | None,
    ) -> Prediction:
        order = np.argsort(-probabilities, kind="stable")
        top = tuple(
            ClassCandidate(int(id), self.manifest.classes[id], float(probabilities[id]))
            for id in order[: most or self.top]
        )
        inside = tuple(self.manifest.classes[id] for id in order if possible[id])
        best, status = top[0], self._status(len(inside), distance)
        id, label = (best.class_id, best.label) if status == "answered" else (None, None)
        return Prediction(name, id, label, best.probability, status, distance, top, inside, self._set_promise)

    @property
    def _set_promise(self) -> float:
        return self.promise or DEFAULT_PROMISE

    def _status(self, possible: int, distance: float) -> Status:
        if distance > self.furthest:
            return "unknown"
        return "answered" if possible == 1 or not self.promise else "unsure"


def names_of(file: str, count: int, input: InputSpec) -> list[str]:
    """Name the samples of a file: by their times in seconds if it has several, or by number if they have no rate."""
    if count == 1:
        return [file]
    if not input.rate:
        return [f"{file}[{row}]" for row in range(count)]
    starts_s = [row * input.hop / input.rate for row in range(count)]
    return [f"{file} {start:.1f}-{start + input.window / input.rate:.1f} s" for start in starts_s]


class _Unread(NamedTuple):
    """A skipped file with the error."""

    path: Path
    error: UnusableFileError


def _batches(
    source: Path, input: InputSpec, bits: int, on_skip: OnSkip, on_remark: OnRemark
) -> Iterator[tuple[list[str], Array]]:
    """Yield (names, samples [n, ...]) in batches."""
    about = ABOUT[input.kind]
    expected = f"expected {about.files}, a folder of them, or an .npz"
    if not source.exists():
        raise DataError(f"{text(source)}: no such file or folder; {expected}")
    files, is_folder = [source], source.is_dir()
    if is_folder:
        listing = walk(source)
        for path, reason in listing.skipped:
            on_skip(path, reason)
        if listing.system_remark:
            on_remark(listing.system_remark)
        files = [path for path in listing.files if path.suffix.lower() in about.suffixes]
        if not files:
            raise DataError(f"{text(source)}: no {about.sample} in it; {expected}")
    elif reason := unusable(source):
        raise DataError(f"{text(source)}: {reason}; {expected}")
    elif source.suffix == ".npz" and (x := _archived(source, input)) is not None:
        for start in range(0, len(x), BATCH):
            some = x[start : start + BATCH]
            names = [f"{text(source.name)}[{start + row}]" for row in range(len(some))]
            yield names, modalities.of(input.kind).fit(some, input, source)
        return
    elif (other := kind_of(source)) and source.suffix.lower() not in about.suffixes:
        raise DataError(
            f"{text(source)}: {ABOUT[other].files} ({other}), but the release takes {about.samples} ({input.kind}); {expected}"
        )
    count, unused, remarks = 0, Skipped(), Skipped()
    for batch in ahead(_read(files, source, input, bits, remarks)):
        if isinstance(batch, _Unread):
            on_skip(batch.path, batch.error.words)
            unused.add(batch.path, batch.error.reason, batch.error.detail, root=source)
        else:
            count += len(batch[0])
            yield batch
    for line in quality(remarks, about, remarks.names):
        on_remark(line)
    if not count:
        why = "; ".join(named(reason, number, unused.names[reason]) for reason, number in unused.items())
        raise DataError(f"{text(source)}: no {about.sample} in it can be read ({why})")


def _read(
    files: Sequence[Path], source: Path, input: InputSpec, bits: int, remarks: Skipped
) -> Iterator[tuple[list[str], Array] | _Unread]:
    """Read files, one at a time, and count remarks on them; of a folder those that cannot be read are skipped."""
    names, pieces = list[str](), list[Array]()
    for file in files:
        try:
            x, said = modalities.of(input.kind).read(file, input, bits=bits)
        except UnusableFileError as error:
            if file == source:
                raise DataError(error.message, NOTHING_PREDICTED) from error
            yield _Unread(file, error)
            continue
        for remark in said:
            remarks.add(file, remark, root=source.parent if file == source else source)
        of_file = names_of(text(file), len(x), input)
        for start in range(0, len(x), PIECE):
            pieces.append(x[start : start + PIECE])
            names.extend(of_file[start : start + PIECE])
            if len(names) >= BATCH:
                yield names, np.concatenate(pieces)
                names, pieces = [], []
    if names:
        yield names, np.concatenate(pieces)


def _archived(source: Path, input: InputSpec) -> Array | None:
    """The samples in an .npz; None if it is a recording. Raises DataError."""
    content = npz.read(source)
    key = next((key for key in X_KEYS if key in content), None)
    if ".npz" in ABOUT[input.kind].suffixes and (key is None or content[key].ndim <= len(input.shape)):
        return None
    if key is None:
        raise DataError(
            f"{text(source)}: holds {', '.join(content) or 'nothing'}, expected {' or '.join(X_KEYS)}"
        )
    return modalities.of(input.kind).arrays(content[key], f"{text(source)} ({key})")
