"""What the fleet's head adds to the bytes that a device downloads: four for each class and feature."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from edge_fl.blob import describe
from edge_fl.config import MethodConfig, MethodSpec, ModelConfig
from edge_fl.heads.class_statistics import sums
from edge_fl.heads.class_statistics.prior import PRIOR
from edge_fl.heads.class_statistics.sums import ADDED, DEVICES, LEFT_OUT, NAMES
from edge_fl.heads.fleet import FLEET
from edge_fl.inputs import InputSpec
from edge_fl.methods import build_method
from edge_fl.methods.contract import steps
from edge_fl.release.manifests import Manifest
from edge_fl.wire import tensors
from edge_fl_server.release import export, fleet_head
from edge_fl_server.release.export import ReleaseOrigin
from edge_fl_server.release.fleet_head import FleetExtra
from edge_fl_server.release.repository import Repository

SIZES = [(10, 50), (10, 512), (7, 1280), (100, 512)]
"""Classes and features: digits, CIFAR-10, PACS on the frozen backbone, CIFAR-100."""


def released(
    name: str, classes: int, dim: int, fleet: FleetExtra | None = None
) -> tuple[Manifest, dict[str, bytes]]:
    """A release of a method whose extractor is not trained, with features of `dim` dimensions."""
    model = ModelConfig("cnn-tiny", {"feature_dim": dim, "width": 2})
    spec = MethodSpec(
        model, InputSpec((1, 8, 8)), [f"class {number}" for number in range(classes)], MethodConfig(name), 0
    )
    method = build_method(spec)
    return export.release(method, steps.start(method), spec, ReleaseOrigin(1, "toy", 1), fleet=fleet)


def downloaded(folder: Path, manifest: Manifest, payloads: dict[str, bytes]) -> int:
    """Bytes of all files of a release: the signed metadata and the payloads."""
    repository = Repository(folder)
    repository.publish(manifest)
    return sum(len(content) for _, content in repository.files()) + sum(map(len, payloads.values()))


def features(classes: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Features of ten samples of each class."""
    z = np.random.default_rng(0).normal(size=(10 * classes, dim)).astype(np.float32)
    return z, np.arange(len(z)) % classes


def added(tmp_path: Path, with_it: tuple[Manifest, dict[str, bytes]], without: Manifest) -> int:
    manifest, payloads = with_it
    wanted = {blob.sha256 for blob in (without.extractor, *without.extras.values())}
    kept = {sha256: payload for sha256, payload in payloads.items() if sha256 in wanted}
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    return downloaded(one, manifest, payloads) - downloaded(two, without, kept)


def without_fleet(manifest: Manifest) -> Manifest:
    """The same release as if there were no fleet's heads; the method's own extras stay."""
    extras = {name: blob for name, blob in manifest.extras.items() if name not in (FLEET, PRIOR)}
    return replace(manifest, heads=replace(manifest.heads, fleet="", shares=[]), extras=extras)


@pytest.mark.parametrize(("classes", "dim"), SIZES)
def test_the_head_of_a_method_with_a_shared_one_is_there_already(
    tmp_path: Path, classes: int, dim: int
) -> None:
    manifest, payloads = released("fedavg", classes, dim)
    assert manifest.heads.fleet == "head" and manifest.feature_dim == dim
    assert 0 < added(tmp_path, (manifest, payloads), without_fleet(manifest)) < 40  # its name in the plan


@pytest.mark.parametrize(("classes", "dim"), SIZES)
def test_a_computed_head_adds_at_most_four_bytes_for_each_class_and_feature(
    tmp_path: Path, classes: int, dim: int
) -> None:
    fleet = fleet_head.of_features([features(classes, dim)], classes)
    manifest, payloads = released("fedrep", classes, dim, fleet)
    assert manifest.heads.fleet == FLEET and len(manifest.heads.shares) == classes
    assert added(tmp_path, (manifest, payloads), without_fleet(manifest)) <= 4 * classes * dim


@pytest.mark.parametrize(("classes", "dim"), SIZES)
def test_class_statistics_add_as_much_and_in_small_networks_their_names(
    tmp_path: Path, classes: int, dim: int
) -> None:
    lists = {
        ADDED: np.array([1], np.int32),
        DEVICES: np.array([24], np.int32),
        LEFT_OUT: np.empty((0, 3), np.int64),
    }
    payload = tensors.pack({PRIOR: {**sums.of(*features(classes, dim), classes).arrays(), **lists}})
    plain, payloads = released("fedrep", classes, dim)
    blob, plan = describe(payload), replace(plain.heads, way="cosine", fleet=PRIOR)
    manifest = replace(plain, extras={PRIOR: blob}, heads=plan)
    found = added(tmp_path, (manifest, {**payloads, blob.sha256: payload}), plain)
    assert found <= 4 * classes * dim + (2 * NAMES if dim == 50 else 0)
