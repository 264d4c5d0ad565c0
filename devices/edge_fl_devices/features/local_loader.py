"""Compute features in this process, for the child and for simulated fleets, where many devices share one onnxruntime.

    FOLDER/features/SHA256.rows    the features of samples by extractor, for its owner alone: a row per sample, and the time for one sample

The keys are the sha256 of the extractor and of the sample's values: features never outlive a new release or a changed file, and one new
file does not cause the others to be extracted again. Rows are appended in steps, so an extraction that is killed keeps what it has
computed. `edge_fl_devices.data.file_index` knows the keys of unchanged files.
"""

from __future__ import annotations

import hashlib
import math
import struct
import time
import timeit
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_fl.data.grouping import Groups, Importance
from edge_fl.data.samples import Array, ClientData, Labels
from edge_fl.errors import DataError
from edge_fl.files.disk import reporting
from edge_fl.inputs import InputSpec
from edge_fl_devices.child import Progress, ignore
from edge_fl_devices.data import first_guesses
from edge_fl_devices.data.file_index import FileIndex
from edge_fl_devices.data.load import FEATURES, SampleStream
from edge_fl_devices.data.split import Sets
from edge_fl_devices.features.client_features import ClientFeatures, FeatureSet, LoadedFeatures
from edge_fl_devices.features.extractor import Extractor, Features
from edge_fl_devices.storage.rows import RowFile
from edge_fl_devices.storage.slots import InstalledRelease

LATENCY_RUNS = 3
STEP_SAMPLES, STEP_S = 64, 5.0
KEPT_FILES = 3
KEY_BYTES = 32
LATENCY = struct.Struct(
    "<d"
)  # a row of this length is the time for one sample in milliseconds; the last one counts
ReadData = Callable[[tuple[str, ...], InputSpec], ClientData | SampleStream]
"""Returns the device's samples for these classes and this input, in memory or in batches."""


class LocalFeatureLoader:
    """A `FeatureLoader` that caches features below `folder`, the device's own folder. `threads`: as of `Extractor`.

    Samples are read once per input, in batches that are forgotten; files whose features are known are not read. An extractor is loaded
    for the first sample without cached features. `progress` takes how many files (of arrays: samples) are done.
    """

    def __init__(
        self, read_data: ReadData, folder: Path, *, threads: int = 1, progress: Progress = ignore
    ) -> None:
        self._read_data, self._folder, self._threads = read_data, folder / FEATURES, threads
        self._device = folder
        self._progress = progress

    def __call__(self, releases: Sequence[InstalledRelease]) -> LoadedFeatures:
        by_input: dict[InputSpec, list[InstalledRelease]] = {}
        for release in releases:
            by_input.setdefault(release.manifest.input, []).append(release)
        classes = tuple(releases[0].manifest.classes)
        (input, same), *others = by_input.items()
        first = self._extract(same, classes, input)
        importance = first_guesses.importance(first_guesses.read(self._device), first.stream.files)
        features = first.features(first.stream.sets, importance)
        for input, others_same in others:
            try:
                other = self._extract(others_same, classes, input)
            except DataError:
                continue  # the samples do not fit this input
            if np.array_equal(other.stream.labels, first.stream.labels):
                features |= other.features(first.stream.sets, importance)
        by_extractor = tuple(features.get(release.manifest.extractor.sha256) for release in releases)
        return LoadedFeatures(by_extractor, _fingerprint(first, importance), bits=first.stream.bits)

    def labelled(self, release: InstalledRelease) -> tuple[FeatureSet, SampleStream]:
        """The features of all labelled samples in the order of reading, and their stream, which was read. Raises DataError."""
        manifest = release.manifest
        found = self._extract([release], tuple(manifest.classes), manifest.input)
        nothing = np.empty(0, np.int64)
        sets = np.arange(len(found.keys)), nothing, nothing
        return found.features(sets, np.empty(0))[manifest.extractor.sha256].train, found.stream

    def _extract(
        self, releases: Sequence[InstalledRelease], classes: tuple[str, ...], input: InputSpec
    ) -> _Extracted:
        """Read the samples in one size and compute what is unknown of their features, in steps that are kept."""
        data = self._read_data(classes, input)
        stream = data if isinstance(data, SampleStream) else SampleStream.of(data, classes, input)
        extractions = {
            release.manifest.extractor.sha256: _Extraction(release, self._folder, self._threads)
            for release in releases
        }
        keys, files = list[bytes](), set[bytes]()
        kept, kept_s = 0, time.monotonic()
        try:
            for batch in stream.read(lambda key: any(key not in each for each in extractions.values())):
                batch_keys = [facts.key for facts in batch.facts]
                decoded = [batch_keys[row] for row in batch.rows]
                for extraction in extractions.values():
                    extraction.add(batch.x, decoded)
                keys += batch_keys
                if len(keys) - kept >= STEP_SAMPLES or time.monotonic() - kept_s >= STEP_S:
                    _keep(extractions.values(), stream.index)
                    kept, kept_s = len(keys), time.monotonic()
                files.update(facts.file for facts in batch.facts)
                done = len(files) if stream.total else len(keys)
                self._progress(done, max(stream.total, done))
        finally:
            _keep(extractions.values(), stream.index)
        if stream.index:
            stream.index.tidy()
        return _Extracted(extractions, keys, stream)


def _keep(extractions: Iterable[_Extraction], index: FileIndex | None) -> None:
    """Write what was computed since the last call: the next attempt continues from here if this one is killed or expires."""
    for extraction in extractions:
        extraction.keep()
    if index:
        index.flush()


@dataclass(frozen=True, eq=False)
class _Extracted:
    """Extractors by sha256 that know the features of all samples, with the samples' keys, and their stream, which was read."""

    extractions: dict[str, _Extraction]
    keys: list[bytes]
    stream: SampleStream

    def features(self, sets: Sets, importance: Importance) -> dict[str, ClientFeatures]:
        """The features by sha256, divided into `sets`, with the importance [n] of all samples."""
        stream = self.stream
        return {
            sha256: extraction.features(self.keys, sets, stream.labels, stream.groups, importance)
            for sha256, extraction in self.extractions.items()
        }


class _Extraction:
    """Features of the samples from one release's extractor: those in its file in `folder`, and computed ones, which are added to it."""

    def __init__(self, release: InstalledRelease, folder: Path, threads: int) -> None:
        self._release, self._threads = release, threads
        self._file = RowFile(folder / f"{release.manifest.extractor.sha256}.rows")
        self._rows, self._latency_ms = read_features(self._file, release.manifest.feature_dim)
        self._new: dict[bytes, Features] = {}
        self._extractor: Extractor | None = None

    def __contains__(self, key: bytes) -> bool:
        return key in self._rows

    def add(self, samples: Array, keys: Sequence[bytes]) -> None:
        """Compute the features of samples [n, ...] with these keys that are not known yet."""
        unknown = [row for row, sample in enumerate(keys) if sample not in self._rows]
        if not unknown:
            return
        if self._extractor is None:
            self._extractor = Extractor(self._release.extractor, self._release.manifest, self._threads)
            self._latency_ms = latency_ms(self._extractor, samples[unknown[:1]])
        z = self._extractor.features(samples[unknown])
        new = dict(zip((keys[row] for row in unknown), z, strict=True))
        self._rows.update(new)
        self._new.update(new)

    def keep(self) -> None:
        """Write what was computed since the last call. Raises ArtefactError for a full disk."""
        if self._new:
            with reporting("features"):
                self._file.append(encoded(self._new, self._latency_ms))
            self._file.evict(KEPT_FILES)
            self._new = {}

    def features(
        self, keys: Sequence[bytes], sets: Sets, labels: Labels, groups: Groups, importance: Importance
    ) -> ClientFeatures:
        """Return the features of the three sets; those of samples that are gone are dropped from the file."""
        rows = {sample: self._rows[sample] for sample in keys}
        if len(rows) < len(self._rows):
            with reporting("features"):
                self._file.replace(encoded(rows, self._latency_ms))
            self._rows, self._new = rows, {}
        self.keep()
        z = np.stack([rows[sample] for sample in keys])
        train, validation, test = (
            FeatureSet(
                z[part],
                labels[part],
                groups[part] if len(groups) else groups,
                importance[part] if len(importance) else importance,
            )
            for part in sets
        )
        return ClientFeatures(train, validation, test, self._latency_ms)


def read_features(file: RowFile, dim: int) -> tuple[dict[bytes, Features], float]:
    """Read features [dim] by the key of their sample, and the time for one sample (0: not measured); what is not finite is left out."""
    known: dict[bytes, Features] = {}
    latency_ms = 0.0
    for row in file.read():
        if len(row) == LATENCY.size:
            (latency_ms,) = LATENCY.unpack(row)
        elif (
            len(row) == KEY_BYTES + 4 * dim
            and np.isfinite(z := np.frombuffer(row, "<f4", dim, KEY_BYTES)).all()
        ):
            known[row[:KEY_BYTES]] = z
    return known, latency_ms if math.isfinite(latency_ms) else 0.0


def encoded(features: Mapping[bytes, Features], latency_ms: float) -> Iterator[bytes]:
    """Yield the rows of features by the key of their sample, and of the time for one sample."""
    yield LATENCY.pack(latency_ms)
    for key, z in features.items():
        yield key + z.astype("<f4").tobytes()


def latency_ms(extractor: Extractor, sample: Array) -> float:
    """Time of the extractor for one sample [1, ...]: the shortest of a few runs."""
    return 1000 * min(timeit.repeat(lambda: extractor.features(sample), number=1, repeat=LATENCY_RUNS))


def _fingerprint(found: _Extracted, importance: Importance) -> str:
    """sha256 over samples and labels of the three sets, and over groups and importance if there are any."""
    total = hashlib.sha256()
    for rows in found.stream.sets:
        total.update(len(rows).to_bytes(8, "big"))
        for row in rows:
            total.update(found.keys[row] + int(found.stream.labels[row]).to_bytes(8, "big"))
    total.update(found.stream.groups.astype(">i8").tobytes())
    total.update(importance.astype(">f8").tobytes())
    return total.hexdigest()
