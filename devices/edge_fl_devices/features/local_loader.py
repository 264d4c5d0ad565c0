"""Compute features in this process, for the child and for simulated fleets, where many devices share one onnxruntime."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from edge_fl.data.samples import ClientData, Images, Labels
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

    Images are read once, in batches that are forgotten; an extractor is loaded when the first image without cached features comes.
    """

    def __init__(self, read_data: ReadData, folder: Path, *, threads: int = 1) -> None:
        self._read_data, self._cache, self._threads = read_data, FeatureCache(folder / FOLDER), threads

    def __call__(self, releases: Sequence[Installed]) -> LoadedFeatures:
        manifest = releases[0].manifest
        data = self._read_data(tuple(manifest.classes), manifest.input)
        stream = (
            data if isinstance(data, ImageStream) else ImageStream.of(data, manifest.classes, manifest.input)
        )
        comparable = [release for release in releases if release.manifest.input == manifest.input]
        extractions = {
            release.manifest.extractor.sha256: _Extraction(release, self._cache, self._threads)
            for release in comparable
        }
        keys: list[bytes] = []
        for batch in stream:
            batch_keys = [key(image) for image in batch.x]
            for extraction in extractions.values():
                extraction.add(batch.x, batch_keys)
            keys += batch_keys
        sets, labels = stream.sets, stream.labels
        features = {
            sha256: extraction.features(keys, sets, labels) for sha256, extraction in extractions.items()
        }
        by_extractor = (
            features[release.manifest.extractor.sha256] if release in comparable else None
            for release in releases
        )
        return LoadedFeatures(tuple(by_extractor), _fingerprint(keys, sets, labels))


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
