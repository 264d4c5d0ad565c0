"""The pool keeps whole pictures within its limits, rejects near duplicates, and drops the least informative ones."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from edge_fl.errors import DataError
from edge_fl_devices.config import CaptureConfig
from edge_fl_maker.capture import pools
from edge_fl_maker.capture.pools import INDEX, Pool, PoolEntry
from tests.maker.capture.scenes import encoded, pixels, scene

CHILD = [sys.executable, "-m", "tests.maker.capture.add_pictures"]


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    return Pool(tmp_path / "unlabelled", CaptureConfig())


def test_a_picture_is_kept_as_it_is_with_its_source_and_time(pool: Pool) -> None:
    assert pool.names() == [] and pool.size_bytes == 0 and pool.entries() == {}
    added = pool.add(scene(1), "camera 0")
    assert pool.names() == [added.name] and not added.why
    assert pool.path(added.name).read_bytes() == scene(1) and pool.size_bytes == len(scene(1))
    entry = pool.entries()[added.name]
    assert entry.source == "camera 0" and entry.time > 1.7e9
    assert pool.folder.stat().st_mode & 0o077 == pool.path(added.name).stat().st_mode & 0o077 == 0


def test_other_formats_become_jpeg_and_damaged_files_are_rejected_by_name(pool: Pool) -> None:
    added = pool.add(scene(1, "BMP"), "a")
    assert added.name.endswith(".jpg")
    with Image.open(pool.path(added.name)) as found:
        assert found.format == "JPEG" and np.abs(np.asarray(found, int) - pixels(1)).mean() < 2
    for damaged, why in (
        (b"", "empty file"),
        (b"no picture", "content is not a picture"),
        (scene(2)[:100], "truncated"),
    ):
        found = pool.add(damaged, "b")
        assert (found.name, found.why) == ("", "unusable") and found.detail.startswith(why)
    assert pool.names() == [added.name]


def test_the_same_scene_with_noise_is_a_duplicate_and_one_with_an_object_is_not(pool: Pool) -> None:
    rng = np.random.default_rng(0)
    scenery = np.asarray(Image.fromarray(pixels(1)).resize((480, 480), Image.Resampling.BICUBIC))
    assert pool.add(encoded(scenery), "a").name
    noisy = (scenery + rng.normal(0, 6, scenery.shape)).clip(0, 255).astype(np.uint8)
    brighter = (scenery * 1.2).clip(0, 255).astype(np.uint8)
    for number, same in enumerate((scenery, noisy, brighter)):
        assert pool.add(encoded(same, "JPEG"), f"b{number}").why == "duplicate"
    changed = noisy.copy()
    changed[200:340, 150:290] = 255
    assert pool.add(encoded(changed, "JPEG"), "c").name


def test_a_removed_picture_does_not_return_unless_it_is_put_back(pool: Pool) -> None:
    name = pool.add(scene(1), "a").name
    pool.remove(name)
    assert pool.names() == [] and pool.add(scene(1), "b").why == "duplicate"
    pool.restore(name, scene(1))
    assert pool.names() == [name] and pool.entries()[name].source == "a"


@pytest.mark.parametrize("name", ["gone.jpg", "../memory.json", "index.jsonl", "", ".lock"])
def test_only_pictures_of_the_pool_have_a_path(pool: Pool, name: str) -> None:
    pool.add(scene(1), "a")
    for action in (pool.path, pool.remove):
        with pytest.raises(DataError, match="not among the files without labels"):
            action(name)
    assert len(pool.names()) == 1


def test_a_source_adds_at_most_one_picture_per_interval(tmp_path: Path) -> None:
    now = [1000.0]
    pool = Pool(tmp_path, CaptureConfig(every_s=10), clock=lambda: now[0])
    found = []
    for passed_s in (0, 9, 11, 12, 22):
        now[0] = 1000.0 + passed_s
        added = pool.add(scene(passed_s), "camera")
        found.append((added.why, added.retry_s))
        assert pool.add(scene(100 + passed_s), f"other {passed_s}").name
    assert found == [("", 0), ("too soon", 1), ("", 0), ("too soon", 9), ("", 0)]
    now[0] = 0.0  # the clock was set back
    assert pool.add(scene(50), "camera").name


def test_a_full_pool_drops_the_least_informative_pictures(tmp_path: Path) -> None:
    by_name: dict[str, int] = {}
    ordered = []

    def most_informative_first(names: list[str]) -> list[str]:
        ordered.append(len(names))
        return sorted(names, key=lambda name: -(by_name[name] % 40))

    pool = Pool(tmp_path, CaptureConfig(max_pictures=40), order=most_informative_first)
    for number in range(80):
        by_name[pool.add(scene(number), str(number)).name] = number
        assert len(pool.names()) <= 40
    kept = [by_name[name] % 40 for name in pool.names()]
    assert len(kept) >= 38 and min(kept) >= 18 and len(ordered) <= 80 / 2 / 2
    assert pool.add(scene(0), "again").why == "duplicate"


def test_without_an_order_a_full_pool_is_an_even_sample_of_all_pictures(tmp_path: Path) -> None:
    pool = Pool(tmp_path, CaptureConfig(max_pictures=40))
    added = [pool.add(scene(number), str(number)).name for number in range(200)]
    kept = pool.names()
    assert set(sorted(added)[:36]) <= set(kept)
    assert 7 <= sum(name in kept for name in added[:100]) <= 33


def test_the_pictures_never_take_more_than_the_disk_space_of_the_settings(tmp_path: Path) -> None:
    pool = Pool(tmp_path, CaptureConfig(max_mb=2000 / 2**20))
    for number in range(20):
        assert pool.add(scene(number), str(number)).name
        assert pool.size_bytes <= 2000
    assert pool.size_bytes > 1000
    large = pool.add(encoded(np.random.default_rng(0).integers(0, 256, (50, 50), np.uint8)), "large")
    assert large.why == "too large" and "at most" in large.detail


def test_the_disk_keeps_space_for_everything_else(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "SPARE_BYTES", 2**60)
    found = pool.add(scene(1), "a")
    assert found.why == "disk full" and "bytes needed" in found.detail
    monkeypatch.undo()
    assert pool.add(scene(1), "a").name


def test_on_a_full_disk_a_full_pool_drops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(tmp_path, CaptureConfig(max_pictures=3))
    names = sorted(pool.add(scene(number), str(number)).name for number in range(3))
    monkeypatch.setattr(pools, "SPARE_BYTES", 2**60)
    assert pool.add(scene(3), "3").why == "disk full" and pool.names() == names


def test_damaged_lines_of_the_index_are_skipped_and_old_ones_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "REMEMBERED", 10)
    pool = Pool(tmp_path, CaptureConfig(max_pictures=2, max_mb=1))
    for number in range(15):
        pool.add(scene(number), str(number))
        with (tmp_path / INDEX).open("ab") as file:
            file.write(b'\n{"name": "to')  # as a power cut leaves it
    assert pool.add(scene(0), "a").why == "duplicate"
    for number in range(15, 40):
        assert pool.add(scene(number), str(number)).name
    lines = (tmp_path / INDEX).read_bytes().splitlines()
    assert len(lines) <= 22 and pool.entries().keys() == set(pool.names())
    assert pool.add(scene(0), "a").name


def test_a_line_that_another_process_is_writing_is_read_when_it_is_whole(pool: Pool) -> None:
    first = pool.add(scene(1), "a").name
    line = msgspec.json.encode(PoolEntry("b" * 16 + ".png", "b", 1.0, "00ff" * 4))
    (pool.folder / ("b" * 16 + ".png")).write_bytes(scene(2))
    with (pool.folder / INDEX).open("ab", buffering=0) as file:
        file.write(b"\n" + line[:20])
        assert pool.entries().keys() == {first}
        file.write(line[20:])
    assert pool.entries().keys() == {first, "b" * 16 + ".png"} and pool.entry("b" * 16 + ".png")


def test_a_pool_of_twenty_thousand_pictures_is_listed_once_and_its_index_not_written_anew_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, lines = np.random.default_rng(0), []
    for number in range(20_000):
        name = f"{number:016x}.png"
        os.mknod(tmp_path / name)
        lines.append(msgspec.json.encode(PoolEntry(name, f"s{number}", 1.0, rng.bytes(8).hex())))
    (tmp_path / INDEX).write_bytes(b"\n".join(lines))
    pool = Pool(tmp_path, msgspec.convert({"max_pictures": 25_000, "max_mb": 50_000}, CaptureConfig))
    looks, reads = [], []
    scandir, lines_of = os.scandir, pools._entry
    monkeypatch.setattr(pools.os, "scandir", lambda path: looks.append(path) or scandir(path))
    monkeypatch.setattr(pools, "_entry", lambda line: reads.append(1) or lines_of(line))
    os.utime(tmp_path, (1, 1))  # long before the first look
    for _ in range(10):
        assert len(pool.names()) == 20_000 and pool.size_bytes == 0 and pool.path(f"{7:016x}.png")
        entry = pool.entry(f"{19_999:016x}.png")
        assert entry and entry.source == "s19999"
    assert len(looks) == 1 and len(reads) <= 20_001
    inode = (tmp_path / INDEX).stat().st_ino
    added = [pool.add(scene(number), f"new {number}").name for number in range(3)]
    assert (tmp_path / INDEX).stat().st_ino == inode and len(reads) < 20_100
    assert set(added) < set(pool.names()) and len(pool.names()) == 20_003
    (tmp_path / f"{7:016x}.png").unlink()  # by another process
    assert len(pool.names()) == 20_002
    with pytest.raises(DataError):
        pool.path(f"{7:016x}.png")


def test_limits_beyond_the_disk_are_said_with_what_it_can_hold(tmp_path: Path) -> None:
    assert Pool(tmp_path, CaptureConfig()).too_small_disk() == ""
    remark = Pool(tmp_path, CaptureConfig(max_pictures=10**7, max_mb=1e12)).too_small_disk()
    assert "max_mb = 1e+12, but the disk has room for " in remark and " MB of pictures" in remark


def test_a_file_whose_name_is_no_text_is_no_picture_of_the_pool(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.png")).write_bytes(scene(1))
    assert Pool(tmp_path, CaptureConfig()).names() == []


def test_two_processes_add_at_once(tmp_path: Path) -> None:
    """Both offer 25 of 75 scenes; the pool holds 20."""
    children = [
        subprocess.Popen([*CHILD, str(tmp_path), scenes], stdout=subprocess.PIPE, text=True)
        for scenes in ("0:50", "25:75")
    ]
    found = Counter(line for child in children for line in child.communicate(timeout=60)[0].splitlines())
    assert [child.returncode for child in children] == [0, 0]
    assert found.pop("duplicate") == 25
    assert len(found) == 75 and set(found.values()) == {1}  # names
    pool = Pool(tmp_path, CaptureConfig())
    assert 18 <= len(pool.names()) <= 20
    assert len([line for line in (tmp_path / INDEX).read_bytes().splitlines() if line]) == 75


def run_child(folder: Path, how: str) -> list[str]:
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [*CHILD, str(folder), how], capture_output=True, text=True, timeout=100, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split("\n")[:-1]


def test_on_a_full_disk_the_pool_stays_as_it_is(tmp_path: Path) -> None:
    """In a child whose files may not grow: the picture does not fit, then its line in the index; then space returns."""
    assert run_child(tmp_path, "full") == ["disk full", "disk full"]


def test_a_kill_at_any_step_leaves_no_half_picture(tmp_path: Path) -> None:
    """A child dies by SIGKILL before its n-th change of the disk, for every n until it gets through."""
    (deaths,) = run_child(tmp_path, "kill")
    assert int(deaths) >= 6


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    found = Pool(tmp_path / "file" / "unlabelled", CaptureConfig()).add(scene(1), "a")
    assert found.why == "not writable" and str(tmp_path) in found.detail
