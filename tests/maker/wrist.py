"""A device whose extractor takes windows of two channels, 1 s at 16 Hz, and whose head tells rest (values near 0) from move."""

from pathlib import Path

import numpy as np

from edge_fl import heads
from edge_fl.blob import split
from edge_fl.inputs import InputSpec
from edge_fl.release.manifests import canary_input
from edge_fl.wire.messages import Report
from edge_fl_devices.agent.outbox import Parcel
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store, StoredHead
from tests.devices import graphs

RATE = 16
INPUT = InputSpec(
    (2, RATE),
    (0.0,),
    (1.0,),
    "CT",
    "float32",
    rate=RATE,
    hop=RATE // 2,
    names=("ax", "gyro.z"),
    units=("g", ""),
)
LABELS = ("rest", "move")
LEVELS = {"rest": 0.0, "move": 1.0}


def make(folder: Path, input: InputSpec = INPUT) -> Path:
    """Write the folder of a device that has fitted a head."""
    weights = np.tile(np.eye(2, graphs.DIM, dtype=np.float32).repeat(RATE, axis=0) / RATE, (1, 1))
    payload = graphs.graph(weights=weights, input_shape=("n", *input.shape))
    question = graphs.Canary(seed=5, images=2, features=[])
    expected = canary_input(question, input).reshape(2, -1) @ weights
    manifest = graphs.manifest_for(payload, expected=expected, input=input, classes=list(LABELS))
    slots = Slots(folder / "release")
    slots.prepare(manifest)
    for index, chunk in enumerate(split(payload, manifest.extractor.chunk_bytes)):
        slots.sink(manifest.extractor).add(index, bytes(chunk))
    slots.install(manifest)
    rng, y = np.random.default_rng(0), np.arange(40) % 2
    x = (y[:, None, None] + rng.normal(0, 0.1, (40, *input.shape))).astype(np.float32)
    head = heads.fit(
        "logistic", x.reshape(40, -1) @ weights, y, 2, unit_norm=False, extractor=manifest.extractor.sha256
    )
    parcel = Parcel("toy", 1, Report("rel-1", "head", "boot", 40, {"personal.test_acc.after": 1.0}), 60)
    Store(folder).keep_head(StoredHead(head, 1, parcel))
    return folder
