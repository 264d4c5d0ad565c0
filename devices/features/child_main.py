"""The child that turns a device's data into features for its agent: `python -m devices.features.child_main`.

Without a release it counts the data and measures the board instead.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

import edge_fl
from devices.board import benchmark
from devices.child import serve
from devices.data import load
from devices.data.spec import UNKNOWN, DataSpec
from devices.features.extractor import Extractor, runtime
from devices.features.child_loader import FeatureRequest, Inspection, pack
from devices.features.local_loader import LocalFeatureLoader
from devices.storage.slots import Installed, Slots
from edge_fl.errors import DataError
from edge_fl.release.manifest import decode


def inspect(request: FeatureRequest) -> Inspection:
    """What there is, as far as it can be told."""
    config, can = request.config, runtime()
    folder = Path(config.folder)
    setup = f"{platform.machine()} {platform.python_version()} {can.version} {np.__version__} {edge_fl.__version__}"
    installed, training = Slots(folder / "release").current(), config.tier != "head"
    found = Inspection(
        can,
        speed=benchmark.speed(folder, setup, installed, _extract_black, training=training),
        reach_ms=benchmark.reach_ms(config.broker.address),
    )
    try:
        return replace(found, report=load.load_for(config, _wanted_by(installed))[1])
    except DataError as error:
        return replace(found, trouble=str(error))


def _wanted_by(installed: Installed | None) -> DataSpec:
    """What the release in use takes: a folder that is none of its classes is told as skipped, as the fit skips it."""
    if installed is None:
        return UNKNOWN
    return DataSpec(tuple(installed.manifest.classes), installed.manifest.input)


def _extract_black(installed: Installed, images: int) -> None:
    """Black images through an extractor."""
    extractor = Extractor(installed.extractor, installed.manifest)
    extractor.features(np.zeros((images, *installed.manifest.input.shape), np.uint8))


def answer(request: bytes) -> bytes:
    """A request as bytes -> an inspection as JSON, or features as safetensors."""
    asked = msgspec.json.decode(request, type=FeatureRequest)
    if not asked.releases:
        return msgspec.json.encode(inspect(asked))
    releases = [
        Installed(decode(manifest), Path(extractor), {}, pending=False)
        for extractor, manifest in asked.releases
    ]
    return pack(LocalFeatureLoader(load.loader(asked.config), Path(asked.config.folder))(releases))


if __name__ == "__main__":
    sys.exit(serve("data", answer))
