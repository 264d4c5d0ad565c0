"""The eyes of a device: its images through onnxruntime, as features. `python -m devices.sight.eyes` is the child that an agent looks with.

A simulated fleet looks in its own process (`Here`), because a thousand devices share one onnxruntime.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

import edge_fl
from devices import child, data
from devices.board import benchmark
from devices.data import Data
from devices.sight.features import Extractor, FeatureCache, runtime
from devices.sight.views import Inspection, Order, Seen, Sight, View, pack
from edge_fl.data.samples import ClientData, Samples
from edge_fl.errors import DataError
from edge_fl.release.artefact import Installed, Slots
from edge_fl.release.manifest import Manifest, decode

FEATURES = "features"
TRIES = 3


class Here:
    """Looks in this process; `folder` is the device's own, where features are cached."""

    def __init__(self, data: Data, folder: Path) -> None:
        self._data, self._cache = data, FeatureCache(folder / FEATURES)

    def __call__(self, releases: Sequence[Installed]) -> Sight:
        manifest = releases[0].manifest
        found = self._data(tuple(manifest.classes), manifest.input)
        _require_usable(found, manifest)
        views = (
            self._through(release, found) if release.manifest.input == manifest.input else None
            for release in releases
        )
        return Sight(tuple(views), found.fingerprint())

    def _through(self, release: Installed, found: ClientData) -> View:
        extractor, dim = Extractor(release.extractor, release.manifest), release.manifest.feature_dim

        def seen(samples: Samples) -> Seen:
            nothing = np.empty((0, dim), np.float32)
            return Seen(self._cache.features(extractor, samples.x) if len(samples) else nothing, samples.y)

        train, validation, test = seen(found.train), seen(found.validation), seen(found.test)
        return View(train, validation, test, latency_ms(extractor, found.train))


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
        raise DataError("no training samples on this device; no head was fitted")
    for samples in (data.train, data.validation, data.test):
        if len(samples) and samples.shape != manifest.input.shape:
            raise DataError(
                f"images are {list(samples.shape)}, release {manifest.release} takes {list(manifest.input.shape)}; no head was fitted"
            )
    if (highest := int(np.max(data.train.y))) >= len(manifest.classes):
        raise DataError(
            f"label {highest}, release {manifest.release} knows {len(manifest.classes)} classes; no head was fitted"
        )


def inspect(order: Order) -> Inspection:
    """What there is, as far as it can be told."""
    config, can = order.config, runtime()
    folder = Path(config.folder)
    setup = f"{platform.machine()} {platform.python_version()} {can.version} {np.__version__} {edge_fl.__version__}"
    installed, training = Slots(folder / "release").current(), config.tier != "head"
    found = Inspection(
        can,
        speed=benchmark.speed(folder, setup, installed, _see_nothing, training=training),
        reach_ms=benchmark.reach_ms(config.broker.address),
    )
    try:
        return replace(found, report=data.load_for(config, data.Need())[1])
    except DataError as error:
        return replace(found, trouble=str(error))


def _see_nothing(installed: Installed, images: int) -> None:
    """Black images through an extractor."""
    extractor = Extractor(installed.extractor, installed.manifest)
    extractor.features(np.zeros((images, *installed.manifest.input.shape), np.uint8))


def answer(request: bytes) -> bytes:
    """An order as bytes -> an inspection as JSON, or a sight as safetensors."""
    order = msgspec.json.decode(request, type=Order)
    if not order.releases:
        return msgspec.json.encode(inspect(order))
    releases = [
        Installed(decode(manifest), Path(extractor), {}, pending=False)
        for extractor, manifest in order.releases
    ]
    return pack(Here(data.of(order.config), Path(order.config.folder))(releases))


if __name__ == "__main__":
    sys.exit(child.serve("data", answer))
