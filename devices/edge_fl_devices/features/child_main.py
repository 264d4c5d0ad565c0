"""Entry point of the child process that computes features for the agent: `python -m edge_fl_devices.features.child_main`.

A request without releases makes it count the data and measure the board instead.
"""

from __future__ import annotations

import dataclasses
import platform
import sys
from pathlib import Path

import numpy as np
from msgspec.structs import replace

import edge_fl
from edge_fl.errors import DataError
from edge_fl.process_limits import return_freed_blocks
from edge_fl_devices.board import benchmark
from edge_fl_devices.child import decode, encode, progress, serve
from edge_fl_devices.data import load
from edge_fl_devices.data.spec import UNKNOWN, DataSpec
from edge_fl_devices.features.child_loader import FeatureRequest, Inspection
from edge_fl_devices.features.extractor import Extractor, runtime
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.storage.slots import InstalledRelease, Slots


def inspect(request: FeatureRequest) -> Inspection:
    """Count the data, measure the board's speed and report the runtime."""
    config, onnx_runtime = request.config, runtime()
    folder = Path(config.folder)
    setup = (
        f"{platform.machine()} {platform.python_version()} {onnx_runtime.version} {np.__version__}"
        f" {edge_fl.__version__}"
    )
    installed, training = Slots(folder / "release").current(), config.tier != "head"
    inspection = Inspection(
        onnx_runtime,
        speed=benchmark.speed(folder, setup, installed, _extract_zeros, training=training),
        reach_ms=benchmark.reach_ms(config.broker.address),
    )
    if not request.count:
        return inspection
    try:
        # of the installed release, so that folders outside its class list count as skipped, as in the fit
        manifest = installed.manifest if installed else None
        spec = DataSpec(tuple(manifest.classes), manifest.input) if manifest else UNKNOWN
        spec = dataclasses.replace(spec, files=request.files)
        return replace(inspection, report=load.count_for(config, spec, progress))
    except DataError as error:
        return replace(inspection, trouble=str(error))


def _extract_zeros(installed: InstalledRelease, samples: int) -> None:
    """Run the installed extractor on samples of zeros, on one thread as the other measurements."""
    extractor = Extractor(installed.extractor, installed.manifest, threads=1)
    input = installed.manifest.input
    extractor.features(np.zeros((samples, *input.shape), input.dtype))


def answer(payload: bytes) -> bytes:
    """Handle an encoded `FeatureRequest`: return an encoded `Inspection`, or `LoadedFeatures`."""
    request = decode(payload, FeatureRequest)
    if not request.releases:
        return encode(inspect(request))
    releases = [
        InstalledRelease(manifest, Path(file), {}, pending=False) for file, manifest in request.releases
    ]
    loader = LocalFeatureLoader(
        load.streamer(request.config, request.files),
        Path(request.config.folder),
        threads=0,
        progress=progress,
    )
    with load.recording(request.config):
        return encode(loader(releases))


if __name__ == "__main__":
    return_freed_blocks()
    sys.exit(serve("data", answer))
