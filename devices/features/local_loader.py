"""Features computed in this process: what the child does, and a simulated fleet, where a thousand devices share one onnxruntime."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from devices.data.load import LoadData
from devices.features.cache import FeatureCache
from devices.features.extractor import Extractor
from devices.features.client_features import ClientFeatures, FeatureSet, LoadedFeatures
from devices.storage.slots import Installed
from edge_fl.data.samples import ClientData, Samples
from edge_fl.errors import DataError
from edge_fl.release.manifest import Manifest

FOLDER = "features"
TRIES = 3


class LocalFeatureLoader:
    """Loads in this process; `folder` is the device's own, where features are cached."""

    def __init__(self, load_data: LoadData, folder: Path) -> None:
        self._load_data, self._cache = load_data, FeatureCache(folder / FOLDER)

    def __call__(self, releases: Sequence[Installed]) -> LoadedFeatures:
        manifest = releases[0].manifest
        found = self._load_data(tuple(manifest.classes), manifest.input)
        _require_usable(found, manifest)
        by_extractor = (
            self._through(release, found) if release.manifest.input == manifest.input else None
            for release in releases
        )
        return LoadedFeatures(tuple(by_extractor), found.fingerprint())

    def _through(self, release: Installed, found: ClientData) -> ClientFeatures:
        extractor, dim = Extractor(release.extractor, release.manifest), release.manifest.feature_dim

        def features(samples: Samples) -> FeatureSet:
            nothing = np.empty((0, dim), np.float32)
            z = self._cache.features(extractor, samples.x) if len(samples) else nothing
            return FeatureSet(z, samples.y)

        train, validation, test = map(features, (found.train, found.validation, found.test))
        return ClientFeatures(train, validation, test, latency_ms(extractor, found.train))


def latency_ms(extractor: Extractor, samples: Samples) -> float:
    """The shortest of a few times that the extractor takes for one image: features come from a cache, this does not."""
    times_s = []
    for _ in range(TRIES):
        began_s = time.perf_counter()
        extractor.features(samples.x[:1])
        times_s.append(time.perf_counter() - began_s)
    return 1000 * min(times_s)


def _require_usable(data: ClientData, manifest: Manifest) -> None:
    if not len(data.train):
        raise DataError("no training samples on this device")
    for samples in (data.train, data.validation, data.test):
        if len(samples) and samples.shape != manifest.input.shape:
            raise DataError(
                f"images are {list(samples.shape)}, release {manifest.release} takes {list(manifest.input.shape)}"
            )
    if (highest := int(np.max(data.train.y))) >= len(manifest.classes):
        raise DataError(f"label {highest}, release {manifest.release} knows {len(manifest.classes)} classes")
