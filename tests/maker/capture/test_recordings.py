"""Streams become recordings in the pool, which the label page labels and the modality reads as it reads the user's own."""

import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from edge_fl.fleet.remote_settings import Budget
from edge_fl.inputs import InputSpec
from edge_fl.modalities import audio, series
from edge_fl_devices.config import POOL, CaptureConfig, convert
from edge_fl_maker.capture import capture as captures
from edge_fl_maker.capture import pools, recordings
from edge_fl_maker.capture.capture import Capture
from edge_fl_maker.capture.pools import Pool
from edge_fl_maker.capture.recordings import StreamFiles
from tests.maker.capture.scenes import scene
from tests.maker.capture.test_capture import wait_until
from tests.maker.wrist import INPUT, RATE

SOURCE = f"python:{__name__}:readings"
CLIPS = InputSpec((800,), (0.0,), (1.0,), "T", "float32", rate=8000, hop=800)


def readings() -> Iterator[dict[str, object]]:
    """Three minutes with a gap of 30 s in the second one."""
    for n in range(3 * 60 * RATE):
        if not 70 <= n / RATE < 100:
            yield {"time": 1.7e9 + n / RATE, "ax": np.sin(n), "gyro": {"z": n}, "mode": "walk", 'a "b", c': 1}


def test_recordings_last_a_minute_at_most_and_have_no_gap() -> None:
    found = []
    stream = StreamFiles(SOURCE, INPUT, lambda words: None)
    for each in stream.take():
        content = series.read(BytesIO(each.content), None).samples[0]
        found.append((content.shape[1] / RATE, len(series.read(BytesIO(each.content), INPUT).samples)))
        assert each.kind == "series" and each.content.startswith(b"time,ax,gyro.z\r\n1700000")
    assert [length_s for length_s, _ in found] == pytest.approx([60, 10, 60, 20], abs=0.1)
    assert [windows for _, windows in found] == [119, 18, 119, 38]


def test_without_a_release_all_numbers_are_recorded_under_any_name() -> None:
    first = next(StreamFiles(SOURCE, None, lambda words: None).take())
    described = series.read(BytesIO(first.content), None).samples[0]
    assert first.content.startswith(b'time,ax,gyro.z,"a ""b"", c"\r\n') and described.shape == (
        3,
        60 * RATE + 1,
    )


def test_a_pool_keeps_recordings_as_they_are_and_rejects_copies_and_other_files(tmp_path: Path) -> None:
    pool, content = (
        Pool(tmp_path, CaptureConfig()),
        b"time,ax,gyro.z\n" + b"".join(b"%g,1,%d\n" % (n / RATE, n) for n in range(40)),
    )
    pool.input = INPUT
    added = pool.add(content, "a")
    assert added.name.endswith(".csv") and pool.path(added.name).read_bytes() == content
    assert pool.add(content, "b").why == "duplicate" and pool.add(content.replace(b"39", b"38"), "c").name
    for other, why in (
        (scene(1), ""),
        (content.replace(b"ax", b"ay"), "column"),
        (content[:100], "shorter than a window"),
    ):
        found = pool.add(other, "d")
        assert found.why == "unusable" and why in found.detail
    assert pool.add(audio.wav(np.zeros(800, np.float32), 8000), "e", "audio").why == "unusable"
    pool.input = CLIPS
    assert pool.add(audio.wav(np.zeros(800, np.float32), 8000), "e").name.endswith(".wav")
    assert len(pool.names()) == 1  # those of another kind stay, but are not offered
    pool.input = None
    assert len(pool.names()) == 3


def test_capture_fills_the_pool_and_follows_a_release_with_other_channels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "MIN_RETRY_S", 0.05)
    monkeypatch.setattr(recordings, "RECORDING_S", 2.0)
    notes: list[str] = []
    config = CaptureConfig(f"python:{__name__}:endless", every_s=0.1)
    pool = Pool(tmp_path / POOL, config)
    capture = Capture(config, pool, Budget(), notes.append)
    capture.start()
    wait_until(lambda: len(pool.names()) >= 2)
    pool.input = INPUT
    wait_until(lambda: any(b"time,ax,gyro.z\r\n" in pool.path(name).read_bytes() for name in pool.names()))
    capture.stop()
    assert (
        all(name.endswith(".csv") for name in pool.names())
        and pool.entries()[pool.names()[0]].source == config.source
    )


def endless() -> Iterator[dict[str, float]]:
    n = 0
    while n := n + 1:
        yield {"time": n / RATE, "ax": np.sin(n), "gyro.z": 1.0, "power": n}
        time.sleep(0.001)


def test_on_a_full_disk_recordings_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "SPARE_BYTES", 2**60)
    config = CaptureConfig(SOURCE, every_s=0.1)
    pool = Pool(tmp_path / POOL, config)
    capture = Capture(config, pool, Budget(), lambda words: None)
    capture.start()
    wait_until(lambda: capture.status()["state"] == "disk full")
    monkeypatch.setattr(pools, "SPARE_BYTES", 0)
    wait_until(lambda: sum(capture.status()["since_start"].values()) >= 5)  # type: ignore[attr-defined]
    capture.stop()
    assert pool.names()


def test_a_watched_folder_gives_the_files_of_the_releases_kind(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.wav").write_bytes(audio.wav(np.zeros(800, np.float32), 8000))
    (tmp_path / "in" / "a.png").write_bytes(scene(1))
    config = CaptureConfig(f"watch:{tmp_path}/in", every_s=0.1)
    pool = Pool(tmp_path / POOL, config)
    pool.input = CLIPS
    capture = Capture(config, pool, Budget(), lambda words: None)
    capture.start()
    wait_until(lambda: capture.status()["since_start"] == {"added": 1})
    capture.stop()
    assert [Path(name).suffix for name in pool.names()] == [".wav"]


@pytest.mark.parametrize(
    "source", ["mqtt://host/a/+", "mqtts://user:pass@host:8883/a", "alsa:plughw:1,0", "python:a.b:c"]
)
def test_streams_are_sources_of_the_settings(source: str) -> None:
    assert (
        convert({"id": "pi", "data": "data", "capture": {"source": source}}, "device.toml").capture.source
        == source
    )
