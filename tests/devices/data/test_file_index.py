"""Pictures are decoded once: not again after a restart, a fit, a move to another class, or an extraction that was killed."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from edge_fl.errors import KilledError
from edge_fl.inputs import InputSpec
from edge_fl.modalities import limits, pictures
from edge_fl_devices.child import Child, encode, feature_children
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import file_index, load
from edge_fl_devices.data.current import CurrentData
from edge_fl_devices.data.file_index import SUFFIX, FileFacts, FileIndex, SampleFacts
from edge_fl_devices.data.load import collect
from edge_fl_devices.data.spec import DataSpec
from edge_fl_devices.features.child_loader import ChildFeatureLoader, FeatureRequest
from edge_fl_devices.features.client_features import LoadedFeatures
from edge_fl_devices.features.local_loader import LocalFeatureLoader, read_features
from edge_fl_devices.storage.rows import RowFile
from edge_fl_devices.storage.slots import InstalledRelease
from tests.devices.graphs import WEIGHTS, graph, manifest_for, on_disk
from tests.devices.opened import Opened

MODULE = "edge_fl_devices.features.child_main"


def picture(path: Path, number: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (4, 4), np.uint8)).save(path)
    return path


@pytest.fixture
def config(tmp_path: Path) -> DeviceConfig:
    for number in range(20):
        picture(tmp_path / "images" / "ab"[number % 2] / f"{number}.png", number)
    return DeviceConfig("pi-1", str(tmp_path / "images"), folder=str(tmp_path / "pi"), tier="head")


@pytest.fixture
def release(tmp_path: Path) -> InstalledRelease:
    payload = graph()
    manifest = msgspec.structs.replace(manifest_for(payload), classes=["a", "b"])
    return InstalledRelease(manifest, on_disk(tmp_path, payload), {}, pending=False)


@pytest.fixture
def opened(config: DeviceConfig) -> Iterator[Callable[[], set[str]]]:
    """Returns the names of the pictures that were opened since the last call."""
    images = Path(config.data)
    with closing(Opened(images / "a", images / "b")) as watching:
        yield lambda: {name for name in watching.read() if name}


def features(config: DeviceConfig, release: InstalledRelease) -> LoadedFeatures:
    return LocalFeatureLoader(load.streamer(config), Path(config.folder))([release])


def labels(found: LoadedFeatures) -> int:
    assert found.by_extractor[0]
    return int(found.by_extractor[0].pool.y.sum())


def test_a_restart_with_unchanged_pictures_opens_none_of_them(
    config: DeviceConfig, release: InstalledRelease, opened: Callable[[], set[str]]
) -> None:
    (Path(config.data) / "a" / "bad.png").write_bytes(b"no picture")
    with closing(feature_children()) as children:
        loader = ChildFeatureLoader(config, children)
        first = loader([release])
        assert opened() == {*(f"{number}.png" for number in range(20)), "bad.png"}
        again = loader([release])
        assert opened() == set()
    assert again.fingerprint == first.fingerprint and again.stamp == first.stamp
    assert first.by_extractor[0] and again.by_extractor[0]
    for name in ("train", "validation", "test"):
        for array in ("z", "y"):
            one, other = (getattr(getattr(each.by_extractor[0], name), array) for each in (first, again))
            assert np.array_equal(one, other)
    report = load.count_for(config, DataSpec(("a", "b"), release.manifest.input))
    assert report.samples_per_class == (10, 10) and sum(report.skipped.values()) == 1 and opened() == set()


def test_only_new_changed_and_unreadable_pictures_are_opened(
    config: DeviceConfig, release: InstalledRelease, opened: Callable[[], set[str]]
) -> None:
    images = Path(config.data)
    before = features(config, release)
    picture(images / "a" / "new.png", 50)
    stat, content = (images / "b" / "3.png").stat(), (images / "b" / "5.png").read_bytes()
    (images / "b" / "3.png").write_bytes(content[: stat.st_size].ljust(stat.st_size, b"\0"))
    os.utime(images / "b" / "3.png", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size and time
    (images / "a" / "0.png").unlink()
    opened()
    after = features(config, release)
    assert opened() == {"new.png", "3.png"}
    assert after.fingerprint != before.fingerprint
    file = Path(config.folder) / load.FEATURES / f"{release.manifest.extractor.sha256}.rows"
    known, _ = read_features(RowFile(file), WEIGHTS.shape[1])
    assert len(known) == 19  # not those of pictures that are gone


def test_a_picture_that_moves_to_another_class_is_not_decoded_again(
    config: DeviceConfig, release: InstalledRelease, opened: Callable[[], set[str]]
) -> None:
    images = Path(config.data)
    before = features(config, release)
    opened()
    (images / "a" / "0.png").rename(images / "b" / "0.png")
    after = features(config, release)
    assert opened() == set()
    assert labels(after) == labels(before) + 1 and after.fingerprint != before.fingerprint


def test_other_settings_of_the_split_do_not_take_the_positions_of_others(
    config: DeviceConfig, release: InstalledRelease
) -> None:
    features(config, release)
    other = msgspec.structs.replace(config, seed=5)
    fresh = msgspec.structs.replace(other, folder=f"{config.folder}-fresh")
    assert features(other, release).fingerprint == features(fresh, release).fingerprint


def test_an_extraction_that_is_killed_goes_on_where_it_was(
    config: DeviceConfig, release: InstalledRelease, opened: Callable[[], set[str]]
) -> None:
    images = Path(config.data)
    for number in range(20, 400):
        picture(images / "ab"[number % 2] / f"{number}.png", number)
    opened()
    request = encode(FeatureRequest(config, [(str(release.extractor), release.manifest)]))
    child, done = Child(MODULE, "data"), list[int]()

    def kill(count: int, of: int) -> None:
        done.append(of)
        if count >= 200:
            os.kill(child._process.pid, signal.SIGSEGV)

    with closing(child), pytest.raises(KilledError, match="SIGSEGV"):
        child.request(request, 60, kill)
    assert {*done} == {400}
    opened()
    found = features(config, release)
    again = opened()
    assert 0 < len(again) <= 400 - 128
    fresh = DeviceConfig("pi-1", config.data, folder=f"{config.folder}-fresh")
    assert features(fresh, release).fingerprint == found.fingerprint


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "garbage"])
def test_a_damaged_index_loses_only_what_is_damaged(
    config: DeviceConfig, release: InstalledRelease, opened: Callable[[], set[str]], damage: str
) -> None:
    before = features(config, release)
    (file,) = (Path(config.folder) / load.FEATURES).glob(f"*{SUFFIX}")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    half = len(content) // 2
    file.write_bytes(
        {"empty": b"", "cut": content[:half], "changed": bytes(content), "garbage": b"x" * 999}[damage]
    )
    opened()
    assert features(config, release).fingerprint == before.fingerprint
    assert len(opened()) == 20 if damage in ("empty", "garbage") else 0 < len(opened()) < 20
    assert features(config, release).fingerprint == before.fingerprint and opened() == set()


def test_facts_are_found_by_an_index_of_the_same_reading_alone(config: DeviceConfig) -> None:
    index = FileIndex(Path(config.folder), "any", lambda image: SampleFacts(b"k"))
    path = Path(config.data) / "a" / "0.png"
    index.add(path, path.stat(), FileFacts((SampleFacts(b"k", 0.5),)))
    index.flush()
    again = FileIndex(Path(config.folder), "any", lambda image: SampleFacts(b"k"))
    assert again.find(path, path.stat()) == FileFacts((SampleFacts(b"k", 0.5),))
    assert FileIndex(Path(config.folder), "other", again.facts).find(path, path.stat()) is None


def test_what_is_known_already_is_not_written_again(config: DeviceConfig) -> None:
    index = FileIndex(Path(config.folder), "any", lambda image: SampleFacts(b"k"))
    path = Path(config.data) / "a" / "0.png"
    sizes = []
    for _ in range(3):  # as for three extractors
        index.add(path, path.stat(), FileFacts((SampleFacts(b"k"),)))
        index.flush()
        sizes.append(index.path.stat().st_size)
    assert len({*sizes}) == 1


def test_the_index_drops_files_that_are_gone(config: DeviceConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_index, "SPARE_ROWS", 0)
    folder, images = Path(config.folder), Path(config.data)
    for kept in (20, 4):
        index = FileIndex(folder, "any", lambda image: SampleFacts(b"k"))
        for number in range(kept):
            path = images / "ab"[number % 2] / f"{number}.png"
            if not index.find(path, path.stat()):
                index.add(path, path.stat(), FileFacts((SampleFacts(bytes([number])),)))
        index.tidy()
    size = index.path.stat().st_size
    assert len(FileIndex(folder, "any", index.facts)._by_file) == 4 and size < 1000


def test_a_file_that_cannot_be_read_for_now_is_tried_again(
    config: DeviceConfig, release: InstalledRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, open_path = Path(config.data) / "a" / "0.png", Path.open

    def fail(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == broken:
            raise OSError(errno.EIO, "Input/output error")
        return open_path(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", fail)
        assert (found := features(config, release).by_extractor[0]) and len(found) == 19
    assert (found := features(config, release).by_extractor[0]) and len(found) == 20


def test_a_snapshot_with_fewer_files_reads_those_only(
    config: DeviceConfig, release: InstalledRelease, opened: Callable[[], set[str]]
) -> None:
    current = CurrentData(config)
    current.accept(current.look())
    picture(Path(config.data) / "a" / "new.png", 60)
    opened()
    with closing(feature_children()) as children:
        found = ChildFeatureLoader(config, children, current)([release])
    assert "new.png" not in opened() and found.by_extractor[0] and len(found.by_extractor[0]) == 20


def test_the_range_of_16_bit_pictures_is_known_without_opening_them_and_follows_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(number: int, level: int) -> None:
        folder = tmp_path / "images" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), level, np.uint16)).save(folder / f"{number}.png")

    for number in range(8):
        save(number, 2000 + number)
    device = DeviceConfig("pi-1", f"folder:{tmp_path / 'images'}", folder=str(tmp_path / "home"))

    def read() -> tuple[int, set[int]]:
        stream = load.streamer(device)(("cat", "dog"), InputSpec((1, 8, 8)))
        content = collect(stream)
        if stream.index:
            stream.index.flush()
        parts = (content.train, content.validation, content.test)
        return stream.bits, {int(x) for part in parts if len(part) for x in part.x.ravel()}

    assert read() == (12, {125})
    with monkeypatch.context() as patch:
        save(8, 60_000)  # the sample misses it, so it is skipped
        patch.setattr(pictures, "depth_of", lambda *_: limits.Depth(12))
        assert read() == (12, {125})
    assert read() == (16, {7, 234})
    with monkeypatch.context() as patch:
        patch.setattr(pictures, "is_wide", lambda *_: pytest.fail("opened"))
        patch.setattr(pictures, "bits_used", lambda *_: pytest.fail("opened"))
        assert load.count_for(device, DataSpec(("cat", "dog"), InputSpec((1, 8, 8)))).depth.bits == 16
