"""Features are computed once per extractor and image, and kept for their owner alone."""

import os
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_fl.data.samples import ClientData, Samples
from edge_fl_devices.data.split import key
from edge_fl_devices.features.client_features import LoadedFeatures
from edge_fl_devices.features.extractor import Extractor
from edge_fl_devices.features.local_loader import (
    FEATURES,
    LATENCY_RUNS,
    LocalFeatureLoader,
    encoded,
    read_features,
)
from edge_fl_devices.storage.rows import RowFile
from edge_fl_devices.storage.slots import InstalledRelease
from tests.devices.graphs import WEIGHTS, graph, images, manifest_for, on_disk


@pytest.fixture
def extracted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of images of each run of an extractor."""
    sizes: list[int] = []
    run = Extractor.run

    def counted(self: Extractor, x: NDArray[np.float32]) -> NDArray[np.float32]:
        sizes.append(len(x))
        return run(self, x)

    monkeypatch.setattr(Extractor, "run", counted)
    return sizes


def installed(folder: Path, weights: NDArray[np.float32] = WEIGHTS) -> InstalledRelease:
    payload = graph(weights=weights)
    return InstalledRelease(manifest_for(payload), on_disk(folder, payload), {}, pending=False)


def data(x: NDArray[np.uint8]) -> ClientData:
    samples = Samples(x, np.arange(len(x)) % 2)
    return ClientData(*(samples.take(np.arange(first, len(x), 3)) for first in range(3)))


def loaded(folder: Path, release: InstalledRelease, x: NDArray[np.uint8]) -> LoadedFeatures:
    return LocalFeatureLoader(lambda classes, input: data(x), folder)([release])


def train(found: LoadedFeatures) -> NDArray[np.float32]:
    assert found.by_extractor[0]
    return found.by_extractor[0].train.z


def test_features_are_computed_once_and_survive_a_restart(tmp_path: Path, extracted: list[int]) -> None:
    release, x = installed(tmp_path), images(90)
    first = loaded(tmp_path, release, x)
    assert sum(extracted) == 90 + LATENCY_RUNS
    again = loaded(tmp_path, release, x)
    assert sum(extracted) == 90 + LATENCY_RUNS
    assert np.array_equal(train(first), train(again)) and first.fingerprint == again.fingerprint
    np.testing.assert_allclose(train(first), (x[::3] / 255).reshape(30, 16) @ WEIGHTS, atol=1e-5)
    assert first.by_extractor[0] and again.by_extractor[0]
    assert first.by_extractor[0].latency_ms == again.by_extractor[0].latency_ms > 0


def test_only_new_images_are_extracted(tmp_path: Path, extracted: list[int]) -> None:
    release, x = installed(tmp_path), images(91)
    before = loaded(tmp_path, release, x[:90])
    extracted.clear()
    after = loaded(tmp_path, release, x)
    assert sum(extracted) == 1 + LATENCY_RUNS
    assert before.fingerprint != after.fingerprint
    extracted.clear()
    moved = loaded(tmp_path, release, x[:90])
    assert extracted == [] and moved.fingerprint == before.fingerprint


def test_a_new_extractor_never_meets_old_features(tmp_path: Path) -> None:
    x = images(9)
    once = train(loaded(tmp_path, installed(tmp_path), x))
    np.testing.assert_allclose(
        train(loaded(tmp_path, installed(tmp_path, 2 * WEIGHTS), x)), 2 * once, atol=1e-5
    )


def test_two_releases_are_extracted_in_one_reading_of_the_images(
    tmp_path: Path, extracted: list[int]
) -> None:
    (tmp_path / "other").mkdir()
    releases = [installed(tmp_path), installed(tmp_path / "other", 2 * WEIGHTS)]
    reads: list[int] = []

    def read(*_: object) -> ClientData:
        reads.append(1)
        return data(images(9))

    found = LocalFeatureLoader(read, tmp_path)(releases)
    assert reads == [1] and sum(extracted) == 2 * (9 + LATENCY_RUNS)
    assert found.by_extractor[0] and found.by_extractor[1]
    np.testing.assert_allclose(found.by_extractor[1].train.z, 2 * found.by_extractor[0].train.z, atol=1e-5)


def test_images_that_are_gone_leave_the_cache_with_the_next_extraction(tmp_path: Path) -> None:
    release, x = installed(tmp_path), images(12)
    for part in (x[:9], x[3:]):
        loaded(tmp_path, release, part)
    file = RowFile(tmp_path / FEATURES / f"{release.manifest.extractor.sha256}.rows")
    rows, _ = read_features(file, WEIGHTS.shape[1])
    assert set(rows) == {key(image) for image in x[3:]}


def test_the_cache_keeps_the_extractors_used_last(tmp_path: Path) -> None:
    a, b, c = (RowFile(tmp_path / "cache" / f"{name}.rows") for name in "abc")
    for file, used_s in ((a, 1), (b, 2)):
        file.replace([b"row"])
        os.utime(file.path, (used_s, used_s))
    assert [*a.read()]
    c.replace([b"row"])
    c.evict(2)
    assert [file.path.name for file in (a, b, c) if [*file.read()]] == ["a.rows", "c.rows"]


@pytest.mark.parametrize("garbage", [b"", b"\x93NUMPY", b"\x80\x04pickle", b"x" * 500, None])
def test_a_damaged_cache_file_is_computed_again(
    tmp_path: Path, extracted: list[int], garbage: bytes | None
) -> None:
    release, x = installed(tmp_path), images(9)
    good = train(loaded(tmp_path, release, x))
    (entry,) = (tmp_path / FEATURES).iterdir()
    entry.write_bytes(entry.read_bytes()[:-200] if garbage is None else garbage)
    extracted.clear()
    assert np.array_equal(train(loaded(tmp_path, release, x)), good)
    assert (
        sum(extracted) == (9 if garbage is not None else 4) + LATENCY_RUNS
    )  # whole rows before the end count
    extracted.clear()
    assert np.array_equal(train(loaded(tmp_path, release, x)), good) and not extracted


def test_features_of_another_size_or_that_are_not_finite_are_not_used(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "cache" / "a.rows")
    file.replace(encoded({bytes(32): np.ones(3, np.float32)}, 2.0))
    known, latency_ms = read_features(file, 3)
    assert [*known] == [bytes(32)] and latency_ms == 2.0 and not read_features(file, 4)[0]
    file.append(encoded({bytes(32): np.full(3, np.nan, np.float32), b"k" * 32: np.ones(3, np.float32)}, 1.0))
    known, latency_ms = read_features(file, 3)
    assert {*known} == {bytes(32), b"k" * 32} and np.isfinite(known[bytes(32)]).all() and latency_ms == 1.0


def test_features_are_for_their_owner_alone(tmp_path: Path) -> None:
    loaded(tmp_path, installed(tmp_path), images(9))
    assert stat.S_IMODE((tmp_path / FEATURES).stat().st_mode) == 0o700


def test_the_key_of_an_image_sees_shape_and_pixels() -> None:
    x = images(1)[0]
    assert key(x) == key(x.copy()) == key(np.asfortranarray(x))
    assert len({key(y) for y in (x, x.reshape(1, 2, 8), 255 - x)}) == 3


def test_the_fingerprint_sees_labels_and_sets(tmp_path: Path) -> None:
    release, base = installed(tmp_path), data(images(9))
    changed = [
        base,
        replace(base, train=replace(base.train, y=1 - base.train.y)),
        replace(base, validation=base.test, test=base.validation),
    ]
    found = [LocalFeatureLoader(lambda *_, each=each: each, tmp_path)([release]) for each in changed]
    assert len({each.fingerprint for each in found}) == 3
