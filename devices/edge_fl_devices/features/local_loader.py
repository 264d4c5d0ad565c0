"""Compute features in this process, for the child and for simulated fleets, where many devices share one onnxruntime."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edge_fl.data.samples import ClientData, Samples
from edge_fl_devices.data.load import LoadData, require_usable
from edge_fl_devices.features.cache import FeatureCache
from edge_fl_devices.features.client_features import ClientFeatures, FeatureSet, LoadedFeatures
from edge_fl_devices.features.extractor import Extractor
from edge_fl_devices.storage.slots import Installed

FOLDER = "features"
LATENCY_RUNS = 3


class LocalFeatureLoader:
    """A `FeatureLoader` that caches features below `folder`, the device's own folder."""

    def __init__(self, load_data: LoadData, folder: Path) -> None:
        self._load_data, self._cache = load_data, FeatureCache(folder / FOLDER)

    def __call__(self, releases: Sequence[Installed]) -> LoadedFeatures:
        manifest = releases[0].manifest
        data = self._load_data(tuple(manifest.classes), manifest.input)
        require_usable(data, manifest.classes, manifest.input, "", f"release {manifest.release}")
        by_extractor = (
            self._features(release, data) if release.manifest.input == manifest.input else None
            for release in releases
        )
        return LoadedFeatures(tuple(by_extractor), data.fingerprint())

    def _features(self, release: Installed, data: ClientData) -> ClientFeatures:
        extractor, dim = Extractor(release.extractor, release.manifest), release.manifest.feature_dim

        def features(samples: Samples) -> FeatureSet:
            empty = np.empty((0, dim), np.float32)
            return FeatureSet(
                self._cache.features(extractor, samples.x) if len(samples) else empty, samples.y
            )

        train, validation, test = map(features, (data.train, data.validation, data.test))
        return ClientFeatures(train, validation, test, latency_ms(extractor, data.train))


def latency_ms(extractor: Extractor, samples: Samples) -> float:
    """Time of the extractor for one image, uncached: the shortest of a few runs."""
    times_s = []
    for _ in range(LATENCY_RUNS):
        started_s = time.perf_counter()
        extractor.features(samples.x[:1])
        times_s.append(time.perf_counter() - started_s)
    return 1000 * min(times_s)
