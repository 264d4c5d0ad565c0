"""A test site: a broker with a scripted server, releases of a small extractor, head-only devices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper

from edge_fl.data.samples import ClientData, Samples
from edge_fl.release.manifests import Manifest
from edge_fl.wire.messages import Capability
from edge_fl.wire.transport import Connect
from edge_fl_devices.agent.state import AgentLimits
from edge_fl_devices.features.extractor import runtime
from edge_fl_devices.features.local_loader import LocalFeatureLoader
from edge_fl_devices.install.fetch import FetchLimits
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.runtime.device import Device
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.fits import FitSettings
from edge_fl_devices.workers.head import HeadWorker
from edge_fl_devices.workers.head_fitting import fit_here
from edge_fl_server.release.repository import Repository
from tests.devices import graphs
from tests.devices.scripted import TOPICS, ScriptedServer

QUICK = AgentLimits(settle_s=0.05, resend_s=0.5, retry_s=0.1, return_s=0.1)
FAST = FetchLimits(stall_s=0.3, bad_chunk_s=0.05, quiet_s=0.05, metadata_s=0.5)


def samples(count: int, seed: int) -> Samples:
    """Two classes that differ in brightness."""
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 2
    return Samples(
        (rng.integers(0, 100, (count, 1, 4, 4)) + 150 * y[:, None, None, None]).astype(np.uint8), y
    )


DATA = ClientData(samples(20, 0), samples(4, 1), samples(10, 2))


def big(weights: np.ndarray = graphs.WEIGHTS) -> bytes:
    """An extractor of some 40 chunks in three groups."""
    spare = np.random.default_rng(1).normal(size=10_000).astype(np.float32)
    node = helper.make_node("Identity", ["z"], ["features"])
    return graphs.graph([node], [graphs.constant("spare", spare)], weights=weights)


def expected() -> np.ndarray:
    """Canary features of `big()`."""
    question = graphs.Canary(seed=5, images=2, features=[])
    found: np.ndarray = graphs.canary_input(question, graphs.INPUT).reshape(2, -1) @ graphs.WEIGHTS
    return found


def head_device(
    folder: Path,
    name: str = "pi-01",
    data: Callable[[], ClientData] = lambda: DATA,
    kind: str = "nearest",
    root: bytes | None = None,
    **changes: Any,
) -> Device:
    loader = LocalFeatureLoader(lambda classes, input: data(), folder)
    worker = HeadWorker(
        name,
        Store(folder),
        FitSettings(kind),
        loader=loader,
        fitter=fit_here,
        runtime=runtime,
        trust=Trust(folder / "tuf", root, trust_on_first_use=root is None),
        limits=QUICK,
        **changes,
    )
    can = Capability("head", "x86_64", "3.12", samples=20)
    return Device(name, TOPICS, can, worker, limits=QUICK, fetching=FAST)


@dataclass
class Site:
    """A broker with a scripted server and a repository."""

    connect: Connect
    server: ScriptedServer
    folder: Path
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def __post_init__(self) -> None:
        self.repository = Repository(self.folder / "server")

    def publish(self, payload: bytes | None = None, **changes: Any) -> Manifest:
        """Publish a release of this extractor under the next number."""
        payload = payload or big()
        manifest = graphs.manifest_for(payload, release=next(self.numbers), **changes)
        self.server.release(self.repository, manifest, payload)
        return manifest

    def serve(self, manifest: Manifest, device: str = "pi-01") -> None:
        """Assign a release to a device."""
        id = f"rel-{manifest.release}"
        self.server.assignment(device, "serve", run_id="toy", round=1, id=id, release=manifest.release)

    @property
    def home(self) -> Path:
        """The folder of pi-01."""
        return self.folder / "pi-01"


@contextmanager
def site_over(connect: Connect, folder: Path) -> Iterator[Site]:
    server = ScriptedServer(connect)
    server.online()
    yield Site(connect, server, folder)
    server.leave()
