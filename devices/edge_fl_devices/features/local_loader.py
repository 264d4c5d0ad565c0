"""Compute features in this process, for the child and for simulated fleets, where many devices share one onnxruntime."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_fl.data.samples import ClientData, Images, Labels
from edge_fl.errors import DataError
from edge_fl.inputs import InputSpec
from edge_fl_devices.data.split import Sets
from edge_fl_devices.data.stream import ImageStream
from edge_fl_devices.features.cache import FeatureCache, KnownFeatures, key
from edge_fl_devices.features.client_features import ClientFeatures, FeatureSet, LoadedFeatures
from edge_fl_devices.features.extractor import Extractor
from edge_fl_devices.storage.slots import Installed

FOLDER = "features"
LATENCY_RUNS = 3
ReadData = Callable[[tuple[str, ...], InputSpec], ClientData | ImageStream]
"""Returns the device's images for these classes and this input, in memory or in batches."""


class LocalFeatureLoader:
    """A `FeatureLoader` that caches features below `folder`, the device's own folder. `threads`: as of `Extractor`.

    Images are read once per input, in batches that are forgotten; an extractor is loaded for the first image without cached features.
    """

    def __init__(self, read_data: ReadData, folder: Path, *, threads: int = 1) -> None:
        self._read_data, self._cache, self._threads = read_data, FeatureCache(folder / FOLDER), threads

    def __call__(self, releases: Sequence[Installed]) -> LoadedFeatures:
        by_input: dict[InputSpec, list[Installed]] = {}
        for release in releases:
            by_input.setdefault(release.manifest.input, []).append(release)
        classes = tuple(releases[0].manifest.classes)
        (input, same), *others = by_input.items()
        first = self._extract(same, classes, input)
        features = first.features(first.sets)
        for input, others_same in others:
            try:
                other = self._extract(others_same, classes, input)
            except DataError:
                continue  # the images do not fit this input
            if np.array_equal(other.labels, first.labels):
                features |= other.features(first.sets)
        by_extractor = tuple(features.get(release.manifest.extractor.sha256) for release in releases)
        return LoadedFeatures(by_extractor, _fingerprint(first.keys, first.sets, first.labels))

    def _extract(
        self, releases: Sequence[Installed], classes: tuple[str, ...], input: InputSpec
    ) -> _Extracted:
        """Read all images in one size and compute what is unknown of their features."""
        data = self._read_data(classes, input)
        stream = data if isinstance(data, ImageStream) else ImageStream.of(data, classes, input)
        extractions = {
            release.manifest.extractor.sha256: _Extraction(release, self._cache, self._threads)
            for release in releases
        }
        keys: list[bytes] = []
        for batch in stream:
            batch_keys = [key(image) for image in batch.x]
            for extraction in extractions.values():
                extraction.add(batch.x, batch_keys)
            keys += batch_keys
        return _Extracted(extractions, keys, stream.sets, stream.labels)


@dataclass(frozen=True, eq=False)
class _Extracted:
    """Extractors by sha256 that know the features of all images, with the images' keys, labels and places in the split."""

    extractions: dict[str, _Extraction]
    keys: list[bytes]
    sets: Sets
    labels: Labels

    def features(self, sets: Sets) -> dict[str, ClientFeatures]:
        """The features by sha256, divided into `sets`."""
        return {
            sha256: extraction.features(self.keys, sets, self.labels)
            for sha256, extraction in self.extractions.items()
        }


class _Extraction:
    """Features of the images from one release's extractor: cached, or computed and then cached."""

    def __init__(self, release: Installed, cache: FeatureCache, threads: int) -> None:
        self._release, self._cache, self._threads = release, cache, threads
        self._sha256 = release.manifest.extractor.sha256
        known = cache.read(self._sha256, release.manifest.feature_dim)
        self._rows, self._latency_ms = dict(known.rows), known.latency_ms
        self._extractor: Extractor | None = None

    def add(self, images: Images, keys: Sequence[bytes]) -> None:
        """Compute the features that are not known yet."""
        unknown = [row for row, image in enumerate(keys) if image not in self._rows]
        if not unknown:
            return
        if self._extractor is None:
            self._extractor = Extractor(self._release.extractor, self._release.manifest, self._threads)
            self._latency_ms = latency_ms(self._extractor, images[unknown[:1]])
        z = self._extractor.features(images[unknown])
        self._rows.update(zip((keys[row] for row in unknown), z, strict=True))

    def features(self, keys: Sequence[bytes], sets: Sets, labels: Labels) -> ClientFeatures:
        """Return the features of the three sets; those of images that are gone are dropped from the cache."""
        z = np.stack([self._rows[image] for image in keys])
        if self._extractor:
            rows = {image: self._rows[image] for image in keys}
            self._cache.write(self._sha256, KnownFeatures(rows, self._latency_ms))
        train, validation, test = (FeatureSet(z[rows], labels[rows]) for rows in sets)
        return ClientFeatures(train, validation, test, self._latency_ms)


def latency_ms(extractor: Extractor, image: Images) -> float:
    """Time of the extractor for one image [1, C, H, W]: the shortest of a few runs."""
    times_s = []
    for _ in range(LATENCY_RUNS):
        started_s = time.perf_counter()
        extractor.features(image)
        times_s.append(time.perf_counter() - started_s)
    return 1000 * min(times_s)


def _fingerprint(keys: Sequence[bytes], sets: Sets, labels: Labels) -> str:
    """sha256 over images and labels of the three sets."""
    total = hashlib.sha256()
    for rows in sets:
        total.update(len(rows).to_bytes(8, "big"))
        for row in rows:
            total.update(keys[row] + int(labels[row]).to_bytes(8, "big"))
    return total.hexdigest()
