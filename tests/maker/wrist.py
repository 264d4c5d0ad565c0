"""A device whose extractor takes windows of two channels, 1 s at 16 Hz, and whose head tells rest (values near 0) from move (near 1)."""

import math
from pathlib import Path

import numpy as np

from edge_fl import heads
from edge_fl.blob import split
from edge_fl.inputs import InputSpec
from edge_fl.release.manifests import Canary, canary_input
from edge_fl.wire.messages import Report
from edge_fl_devices.agent.outbox import Parcel
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store, StoredHead
from tests.devices import graphs

RATE = 16
NAMES = ("ax", "gyro.z")
INPUT = InputSpec((2, RATE), (0.0,), (1.0,), "CT", "float32", rate=RATE, hop=RATE // 2, names=NAMES)
PICTURES = graphs.INPUT
LEVELS = {"rest": 0.0, "move": 1.0}


def install(folder: Path, input: InputSpec = INPUT, release: int = 1) -> Path:
    """Install a release in a device's folder, with a head that was fitted on it; return the folder."""
    size = math.prod(input.shape)
    weights = np.eye(2, graphs.DIM, dtype=np.float32)[np.arange(size) * 2 // size] * 2 / size
    payload = graphs.graph(weights=weights, input_shape=("n", *input.shape))
    expected = canary_input(Canary(seed=5, images=2, features=[]), input).reshape(2, -1) @ weights
    manifest = graphs.manifest_for(
        payload, expected=expected, input=input, classes=[*LEVELS], release=release
    )
    slots = Slots(folder / "release")
    slots.prepare(manifest)
    for index, chunk in enumerate(split(payload, manifest.extractor.chunk_bytes)):
        slots.sink(manifest.extractor).add(index, bytes(chunk))
    slots.install(manifest)
    y = np.arange(40) % 2
    z = (y[:, None] + np.random.default_rng(0).normal(0, 0.1, (40, size))).astype(np.float32) @ weights
    head = heads.fit("logistic", z, y, 2, unit_norm=False, extractor=manifest.extractor.sha256)
    parcel = Parcel("toy", release, Report("rel-1", "head", "boot", 40, {"personal.test_acc.after": 1.0}), 60)
    Store(folder).keep_head(StoredHead(head, release, parcel))
    return folder
