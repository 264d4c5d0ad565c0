"""What happens after training: fitting heads, exporting the extractor, signing and publishing it. Times and sizes, without targets."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np

from edge_fl import heads
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.release.manifests import Manifest
from edge_fl.wire import tensors
from edge_fl.wire.topics import Topics
from edge_fl_server.release.export import ReleaseOrigin, release
from edge_fl_server.release.publish import Publisher
from edge_fl_server.release.repository import Repository
from tools.bench import workloads
from tools.bench.figures import Figure
from tools.bench.measure import MEGABYTE, take_turns
from tools.memory_broker import InMemoryBroker, InMemoryTransport

SIZES = ((200, 128), (2000, 512))  # samples, features
MODELS = ("cnn2", "resnet18")


def head(kind: str, turns: int) -> Figure:
    """Fit a head of ten classes on small and on large features."""
    sides: dict[str, Callable[[], object]] = {}
    for samples, dim in SIZES:
        sides[f"{samples} x {dim}"] = partial(_fit, kind, *_features(samples, dim))
    times = take_turns(sides, turns)
    largest = f"{SIZES[-1][0]} x {SIZES[-1][1]}"
    fitted = _fit(kind, *_features(*SIZES[-1]))
    size = len(tensors.pack({"head": fitted.to_arrays()}))
    return Figure(
        f"head {kind}",
        f"fit of a head, {largest} features",
        unit=" ms",
        value=1000 * times[largest].median,
        sides=times,
        notes={"KB": size / 1000},
    )


def released(model: str, turns: int) -> Figure:
    """Export with its check against torch, then signing and publishing to an in-memory broker."""
    study = workloads.work_a(model=model, clients=2, samples=40)
    method = build_method(study.spec)
    shared = steps.start(method)
    numbers = iter(range(1, 1000))

    def export() -> tuple[Manifest, dict[str, bytes]]:
        return release(method, shared, study.spec, ReleaseOrigin(1, "bench", round=1))

    with TemporaryDirectory(prefix="edge-fl-bench-") as folder:
        repository, broker = Repository(Path(folder)), InMemoryBroker()
        publisher = Publisher(
            InMemoryTransport(broker, "bench", None, lambda event: None), Topics("bench"), repository
        )
        manifest, payloads = export()

        def publish() -> None:
            publisher.publish(msgspec.structs.replace(manifest, release=next(numbers)), payloads)

        times = take_turns({"export": export, "publish": publish}, turns)
        broker.close()
    size = manifest.extractor.bytes
    notes: dict[str, float | str] = {"ONNX MB": size / MEGABYTE, "publish ms": 1000 * times["publish"].median}
    what = f"export of {model} to ONNX, checked against torch"
    return Figure(
        f"release {model}", what, unit=" ms", value=1000 * times["export"].median, sides=times, notes=notes
    )


def _features(samples: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.integers(0, workloads.CLASSES, samples)
    means = rng.standard_normal((workloads.CLASSES, dim))
    return (means[y] + rng.standard_normal((samples, dim))).astype(np.float32), y


def _fit(kind: str, z: np.ndarray, y: np.ndarray) -> heads.Head:
    return heads.fit(kind, z, y, workloads.CLASSES, unit_norm=False)
