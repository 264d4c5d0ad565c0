"""Capture from cameras, streams and a watched folder, within the daily budget; everything that stops it is named, and nothing is lost."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from edge_fl import threads
from edge_fl.errors import ConfigError
from edge_fl.fleet.remote_settings import Budget
from edge_fl_devices.board.usage import Usage, today
from edge_fl_devices.config import POOL, CaptureConfig, convert
from edge_fl_maker.capture import capture as captures
from edge_fl_maker.capture import pools
from edge_fl_maker.capture.camera import CameraLimits
from edge_fl_maker.capture.capture import Capture, FileSource, FolderFiles, open_source
from edge_fl_maker.capture.pools import Pool
from edge_fl_maker.labelling.serve import serving
from tests.maker.capture.scenes import scene

QUICK = CameraLimits(timeout_s=20.0, min_retry_s=0.05, max_retry_s=0.1)
EVERY_S = 0.1
WAIT_S = 60.0  # on a busy machine; every wait ends with its event


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "MIN_RETRY_S", 0.05)
    monkeypatch.setattr(captures, "MAX_RETRY_S", 0.1)


@contextmanager
def capturing(
    folder: Path,
    source: str,
    notes: list[str] | None = None,
    budget: Budget | None = None,
    crop: str = "",
) -> Iterator[Capture]:
    config = CaptureConfig(source, crop, every_s=EVERY_S)
    pool = Pool(folder / POOL, config)
    notify = (notes if notes is not None else []).append
    capture = Capture(config, pool, budget or Budget(), notify, QUICK)
    capture.start()
    try:
        yield capture
    finally:
        capture.stop()
        assert capture.status()["state"] == "off"


def wait_until(reached: Callable[[], object]) -> None:
    ends_s = time.monotonic() + WAIT_S
    while not reached():
        assert time.monotonic() < ends_s
        time.sleep(0.02)


def is_in(capture: Capture, state: str) -> Callable[[], bool]:
    return lambda: capture.status()["state"] == state


def seen(capture: Capture) -> int:
    """The number of frames, added or not."""
    return sum(capture.status()["since_start"].values())  # type: ignore[attr-defined]


def has(capture: Capture, pictures: int) -> Callable[[], bool]:
    return lambda: capture.status()["pictures"] == pictures


def put(path: Path, content: bytes) -> None:
    """Let a whole file appear at once."""
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.rename(path)


def test_a_picture_that_arrives_slowly_is_taken_once_it_is_complete(tmp_path: Path) -> None:
    folder, content = FolderFiles(tmp_path), scene(2)
    with (tmp_path / "2.png").open("wb") as file:
        for byte in range(0, len(content), 40):
            file.write(content[byte : byte + 40])
            file.flush()
            assert not [*folder.take()]  # it has grown since the last look
    assert [picture.content for picture in folder.take()] == [content]
    assert not [*folder.take()]


def test_new_pictures_of_a_watched_folder_are_copied(tmp_path: Path) -> None:
    watched = tmp_path / "in"
    (watched / "below").mkdir(parents=True)
    (watched / "0.png").write_bytes(scene(0))  # there before the start
    (watched / "notes.txt").write_bytes(b"no picture")
    (watched / "large.png").touch()
    os.truncate(watched / "large.png", 33 * 2**20)
    with capturing(tmp_path, f"watch:{watched}") as capture:
        wait_until(has(capture, 1))
        put(watched / "below" / "1.jpg", scene(1, "JPEG"))
        put(watched / "copy.png", scene(0))
        put(watched / "2.png", scene(2))
        wait_until(lambda: capture.status()["since_start"] == {"added": 3, "duplicate": 1})
        assert capture.status()["state"] == "capturing"
    assert len([*watched.rglob("*.*")]) == 6  # left where they were
    with capturing(tmp_path, f"watch:{watched}") as capture:  # after a restart
        wait_until(lambda: capture.status()["since_start"] == {"duplicate": 4})


def test_a_watched_folder_that_is_missing_is_named_and_looked_for_again(tmp_path: Path) -> None:
    notes: list[str] = []
    with capturing(tmp_path, f"watch:{tmp_path}/usb", notes) as capture:
        wait_until(is_in(capture, "waiting"))
        (tmp_path / "usb").mkdir()
        put(tmp_path / "usb" / "0.png", scene(0))
        wait_until(has(capture, 1))
    assert len(notes) == 2 and f"{tmp_path}/usb: no such folder" in notes[0] and "trying again" in notes[0]
    assert notes[1] == "capture: capturing"


def test_an_exhausted_budget_pauses_capture_until_the_next_day(tmp_path: Path) -> None:
    """The agent has used its budget of bytes; then its totals are those of another day."""
    notes: list[str] = []
    usage = tmp_path / "usage.json"
    usage.write_bytes(msgspec.json.encode(Usage(today(), bytes=5_000_000)))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.png").write_bytes(scene(0))
    with capturing(tmp_path, f"watch:{tmp_path}/in", notes, Budget(megabytes=5)) as capture:
        wait_until(is_in(capture, "paused"))
        assert capture.add(scene(1), "frame").why == "paused"
        assert capture.status()["why"] == "budget: bytes 5.0 of 5 MB today"
        assert capture.status()["pictures"] == 0
        usage.write_bytes(msgspec.json.encode(Usage("2020-01-01", bytes=5_000_000)))
        wait_until(has(capture, 1))
        assert capture.add(scene(1), "frame").name
    assert notes == ["capture: paused (budget: bytes 5.0 of 5 MB today)", "capture: capturing"]


def test_pictures_count_as_bytes_and_the_time_of_the_processor_as_energy(tmp_path: Path) -> None:
    pool = Pool(tmp_path / "unlabelled", CaptureConfig())
    capture = Capture(CaptureConfig(), pool, Budget(megabytes=1000e-6))
    found = [capture.add(scene(number), str(number)).why for number in range(6)]
    assert found == ["", "", "", "paused", "paused", "paused"]  # 295 bytes each
    tired = Capture(CaptureConfig(), pool, Budget(kilojoules=1e-6))
    assert tired.add(scene(10), "a").detail.startswith("budget: energy (estimate)")


def test_a_full_disk_is_a_state_and_the_picture_is_taken_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    (tmp_path / "in").mkdir()
    monkeypatch.setattr(pools, "SPARE_BYTES", 2**60)
    with capturing(tmp_path, f"watch:{tmp_path}/in", notes) as capture:
        for number in range(3):
            put(tmp_path / "in" / f"{number}.png", scene(number))
        wait_until(is_in(capture, "disk full"))
        assert capture.status()["pictures"] == 0
        monkeypatch.setattr(pools, "SPARE_BYTES", 0)
        wait_until(has(capture, 3))
    assert notes[0].startswith("capture: disk full (") and notes[1] == "capture: capturing"


def test_an_unplugged_camera_is_named_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cv2", reason="edge-fl[camera]")
    notes: list[str] = []
    tried: list[str] = []

    def attempt(config: CaptureConfig, *arguments: Any) -> FileSource:
        tried.append(config.source)
        return open_source(config, *arguments)

    monkeypatch.setattr(captures, "open_source", attempt)
    with capturing(tmp_path, "camera:97", notes) as capture:
        wait_until(lambda: len(tried) >= 4)
        assert is_in(capture, "waiting")()
        assert "camera 97: /dev/video97 cannot be opened" in str(capture.status()["why"])
    assert len(notes) == 1 and notes[0].endswith("; trying again)")


def test_frames_of_a_stream_are_captured_at_the_rate_of_the_settings(tmp_path: Path) -> None:
    pytest.importorskip("cv2", reason="edge-fl[camera]")
    from tests.maker.videos import streaming

    with streaming(fps=100) as (address, stream):
        started_s = time.monotonic()
        with capturing(tmp_path, address) as capture:
            wait_until(lambda: seen(capture) >= 5 and stream.sent > 50)
            status, frames = capture.status(), seen(capture)
        assert frames <= 1 + (time.monotonic() - started_s) / EVERY_S
        assert status["since_start"]["added"] >= 1  # type: ignore[index]
        (name, *_) = Pool(tmp_path / POOL, CaptureConfig()).names()
        with Image.open(tmp_path / POOL / name) as picture:
            assert picture.format == "JPEG" and np.asarray(picture).shape == (64, 64, 3)


def test_captured_frames_are_cropped_and_a_crop_beyond_the_frame_is_named(tmp_path: Path) -> None:
    pytest.importorskip("cv2", reason="edge-fl[camera]")
    from tests.maker.videos import streaming

    with streaming(fps=100) as (address, _):
        with capturing(tmp_path, address, crop="16,0,48,32") as capture:
            wait_until(has(capture, 1))
        (name, *_) = Pool(tmp_path / POOL, CaptureConfig()).names()
        with Image.open(tmp_path / POOL / name) as picture:
            assert picture.size == (48, 32)
        with capturing(tmp_path, address, crop="17,0,48,32") as capture:
            wait_until(is_in(capture, "waiting"))
            assert "crop 17,0,48,32 reaches to 65, 32; its frames have 64 x 64" in str(
                capture.status()["why"]
            )


@pytest.mark.timeout(240)  # the wait for the picture, the one for the interruption, and a stop that hangs
def test_an_interrupted_stream_is_waited_for_and_stopping_does_not_hang(tmp_path: Path) -> None:
    pytest.importorskip("cv2", reason="edge-fl[camera]")
    from tests.maker.videos import streaming

    notes: list[str] = []
    with streaming(fps=50, length=20) as (address, stream):
        secret = address.replace("//", "//user:secret@")
        with capturing(tmp_path, secret, notes) as capture:
            wait_until(has(capture, 1))
            stream.stopped.set()
            wait_until(is_in(capture, "waiting"))
    assert any("interrupted; trying again" in note for note in notes) and "secret" not in str(notes)
    index = (tmp_path / POOL / pools.INDEX).read_text()
    assert "secret" not in index and address in index


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"source": "camera"}, "source"),
        ({"source": "ftp://host/x"}, "source"),
        ({"every_s": 0}, "every_s"),
        ({"sorce": "camera:0"}, "source"),
        ({"source": "camera:0", "crop": "1,2,3"}, "expected x,y,w,h in pixels"),
        ({"source": "mqtt://host/a", "crop": "1,2,3,4"}, "only frames of a camera can be cropped"),
        ({"crop": "1,2,3,4"}, "only frames of a camera can be cropped"),
    ],
)
def test_settings_that_cannot_be_used_are_named(section: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=f"capture.*{says}"):
        convert({"id": "pi", "data": "images", "capture": section}, "device.toml")


def test_without_a_source_nothing_runs(tmp_path: Path) -> None:
    with capturing(tmp_path, "") as capture:
        assert capture.status()["state"] == "off"
        assert capture.add(scene(0), "frame").name


def test_the_service_of_a_device_captures_and_shows_the_state(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.png").write_bytes(scene(0))
    (tmp_path / "images").mkdir()
    settings = {"source": f"watch:{tmp_path}/in", "every_s": 0.1}
    tree = {"id": "pi", "data": f"folder:{tmp_path}/images", "folder": str(folder), "capture": settings}
    with serving(folder, convert(tree, "test"), "127.0.0.1", 0, {}) as service:
        wait_until(lambda: service.health()["capture"]["pictures"] == 1)  # type: ignore[index]
        assert service.health()["capture"]["state"] == "capturing"  # type: ignore[index]


def test_an_unexpected_error_outside_the_camera_is_shown_and_capturing_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "FIRST_PAUSE_S", 0.01)
    (tmp_path / "watched").mkdir()
    read, errors = captures.usage.read, [ZeroDivisionError("no divisor")]

    def fails(folder: Path) -> Usage:
        if errors and threading.current_thread() is not threading.main_thread():
            raise errors.pop()
        return read(folder)

    monkeypatch.setattr(captures.usage, "read", fails)
    notes: list[str] = []
    with capturing(tmp_path, f"watch:{tmp_path / 'watched'}", notes) as capture:
        wait_until(lambda: capture.status()["state"] == "capturing")
    assert "capture: waiting (ZeroDivisionError: no divisor)" in notes
    assert "thread edge-fl-capture: unexpected error" in caplog.text
