"""Recordings of two classes of movement, as CSV files, and a small extractor of their windows."""

from pathlib import Path

import numpy as np

from edge_fl.blob import split
from edge_fl.inputs import InputSpec
from edge_fl.release.manifests import Canary, Manifest, canary_input
from edge_fl.wire.messages import Assignment
from edge_fl_devices.agent.effects import Fit
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import load
from edge_fl_devices.features.extractor import runtime
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import fit_here
from tests.devices import graphs

CLASSES = ("lying", "standing")

SERIES = InputSpec(
    (2, 25), (0.0, 0.0), (1.0, 1.0), "CT", "float32", rate=25.0, hop=25, names=("ax", "az"), units=("g", "g")
)
WEIGHTS = np.random.default_rng(0).normal(size=(50, graphs.DIM)).astype(np.float32)
PAYLOAD = graphs.graph(weights=WEIGHTS, input_shape=("n", 2, 25))


def manifest(release: int = 1) -> Manifest:
    z = canary_input(Canary(seed=5, images=2, features=[]), SERIES).reshape(2, -1) @ WEIGHTS
    return graphs.manifest_for(PAYLOAD, release=release, expected=z, input=SERIES, classes=list(CLASSES))


def recording(path: Path, level: float, windows: int = 4, *, still: bool = False) -> None:
    """Gravity along az at `level`, ax in 0..0.1, or without any change; another name gives other values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    x = np.random.default_rng([*path.name.encode()]).normal(0, 0.1, (25 * windows, 2))
    x[:, 1] += level
    if still:
        x[:, 0] = 0
    rows = [f"{row / 25:.2f},{ax:.4f},{az:.4f}" for row, (ax, az) in enumerate(x)]
    path.write_text("\n".join(["time,ax [g],az [g]", *rows]) + "\n")


def recordings(root: Path, each: int = 6) -> Path:
    """A folder per class; both have files of the same names."""
    for number in range(each):
        recording(root / "lying" / f"{number}.csv", 0.0 + number / 100)
        recording(root / "standing" / f"{number}.csv", 1.0 + number / 100)
    return root


def install(home: Path, payload: bytes, released: Manifest) -> None:
    """Install a release as the agent does."""
    slots = Slots(home / "release")
    slots.prepare(released)
    for index, chunk in enumerate(split(payload, released.extractor.chunk_bytes)):
        slots.sink(released.extractor).add(index, bytes(chunk))
    slots.install(released)


def fit(config: DeviceConfig, release: int = 1) -> None:
    """Fit a head as the agent does."""
    home = Path(config.folder)
    loader = LocalFeatureLoader(load.streamer(config), home)
    worker = HeadWorker(
        config.id, Store(home), FitSettings("logistic"), loader=loader, fitter=fit_here, runtime=runtime
    )
    worker.boot()
    worker.perform(Fit(Assignment(1, "serve", id=f"rel-{release}", release=release), "boot", 0), None)
