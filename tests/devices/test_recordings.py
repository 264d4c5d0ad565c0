"""A device with recordings of sensors: split by recording, fitted, predicted window by window; tables; releases of another kind."""

import os
import sys
import types
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge_fl.cli import main
from edge_fl.data import grouping
from edge_fl.errors import DataError
from edge_fl.failures import Failure
from edge_fl.inputs import InputSpec
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import load, record, sources
from edge_fl_devices.data.load import SampleStream
from edge_fl_devices.data.spec import UNKNOWN, DataSpec
from edge_fl_devices.doctor import status
from edge_fl_devices.serving.predict import Predictor
from tests.devices import graphs
from tests.devices.loading import loaded
from tests.devices.recordings import CLASSES, PAYLOAD, SERIES, fit, install, manifest, recording, recordings

SPEC = DataSpec(CLASSES, SERIES)


@pytest.fixture
def config(tmp_path: Path) -> DeviceConfig:
    return DeviceConfig(
        "watch", f"folder:{recordings(tmp_path / 'data')}", folder=str(tmp_path / "pi"), tier="head"
    )


def test_recordings_are_counted_fitted_and_predicted_window_by_window(
    config: DeviceConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = load.count_for(config, UNKNOWN)  # before the first release a recording counts as one sample
    assert (report.kind, report.samples_per_class) == ("series", (6, 6))
    home = Path(config.folder)
    install(home, PAYLOAD, manifest())
    fit(config)
    report = record.read(home).report
    assert (report.samples, report.scenes) == (48, 12)
    assert load.count_for(config, SPEC).samples_per_class == (24, 24)
    recording(tmp_path / "new.csv", 1.0, windows=3)
    found = list(Predictor(home).read(tmp_path / "new.csv"))
    assert [each.label for each in found] == ["standing"] * 3
    names = [f"{tmp_path / 'new.csv'} {start}.0-{start + 1}.0 s" for start in range(3)]
    assert [each.name for each in found] == names
    sent = Predictor(home).read_file("window", (tmp_path / "new.csv").read_bytes())
    assert [each.probability for each in sent] == [each.probability for each in found]
    np.savez(tmp_path / "windows.npz", x=np.ones((2, 2, 25), np.float32))
    np.savez(tmp_path / "recording.npz", x=np.ones((50, 2)), rate=25.0)
    assert [each.name for each in Predictor(home).read(tmp_path / "windows.npz")][1] == "windows.npz[1]"
    assert len(list(Predictor(home).read(tmp_path / "recording.npz"))) == 2
    (photo := tmp_path / "photo.png").touch()
    with pytest.raises(DataError, match=r"pictures \(picture\), but the release takes windows \(series\)"):
        next(Predictor(home).read(photo))
    (tmp_path / "data" / "lying" / "short.csv").write_text("ax,az\n1,2\n")
    assert main(["device", "predict", str(tmp_path / "data"), "--dir", str(home), "--format", "json"]) == 1
    said = capsys.readouterr()
    assert said.out.count('"lying"') > 24 and "short.csv (shorter than a window" in said.err


def test_windows_of_a_recording_are_in_one_set_and_files_that_have_not_changed_are_not_read_again(
    config: DeviceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(config.data.removeprefix("folder:"))
    recording(root / "lying" / "moved.csv", 0.5)
    data, _ = load.load_for(config, SPEC)
    parts = (data.train, data.validation, data.test)
    sets = [set(part.groups.tolist()) for part in parts]
    assert sum(map(len, sets)) == 13 == len(set[int]().union(*sets)) and all(sets[::2])

    def known() -> SampleStream:
        """What is read although nothing is wanted."""
        stream = load.streamer(config)(CLASSES, SERIES)
        assert sum(len(batch.rows) for batch in stream.read(lambda key: False)) == 0
        return stream

    stream = known()
    assert [len(rows) for rows in stream.sets] == [len(part) for part in parts]
    assert stream.index and len(stream.index._by_file) == 13
    (root / "lying" / "moved.csv").rename(root / "standing" / "moved.csv")
    assert np.bincount(known().labels).tolist() == [24, 28]


def test_a_copy_of_a_recording_is_no_second_scene(config: DeviceConfig) -> None:
    root, home = Path(config.data.removeprefix("folder:")), Path(config.folder)
    install(home, PAYLOAD, manifest())
    for number in range(6):
        (root / "lying" / f"{number} (copy).csv").write_bytes((root / "lying" / f"{number}.csv").read_bytes())
    recording(root / "lying" / "short.csv", 0.0, windows=1)
    (root / "lying" / "short copy.csv").write_bytes((root / "lying" / "short.csv").read_bytes())
    data, report = load.load_for(config, SPEC)
    parts = [set(part.groups.tolist()) for part in (data.train, data.validation, data.test)]
    assert (report.samples, report.scenes) == (12 * 4 + 6 * 4 + 2, 13)
    assert sum(map(len, parts)) == 13 == len(set[int]().union(*parts))  # no copy is in another set
    assert load.count_for(config, SPEC).scenes == 13  # from what is known of the files
    stream = SampleStream(sources.read(str(root), SPEC))  # without it
    list(stream)
    assert grouping.count(stream.groups, len(stream.labels)) == 13
    fit(config)
    assert record.read(home).report.scenes == 13 and len(set(stream.files)) == 20


def test_without_a_release_and_files_the_kind_is_left_open(tmp_path: Path) -> None:
    (tmp_path / "data" / "lying").mkdir(parents=True)
    (tmp_path / "pi").mkdir()
    config = DeviceConfig("watch", f"folder:{tmp_path / 'data'}", folder=str(tmp_path / "pi"))
    with pytest.raises(DataError) as caught:
        load.count_for(config, UNKNOWN)
    rows = {str(row["what"]): str(row["value"]) for row in status.read(Path(config.folder))}
    assert rows["files"].startswith("no labelled files yet, or only one (")
    assert "picture" not in f"{caught.value} {rows['files']}"


def test_a_growing_recording_stays_in_its_set(tmp_path: Path) -> None:
    def tested(windows: int) -> list[bool]:
        """Whether each of the recordings is in the test set."""
        for number in range(20):
            recording(tmp_path / CLASSES[number % 2] / f"{number}.csv", number % 2, windows)
        stream = SampleStream(sources.read(str(tmp_path), SPEC))
        list(stream)
        return np.isin(np.arange(0, 20 * windows, windows), stream.sets[2]).tolist()

    assert tested(3) == tested(4) == tested(7) and any(tested(3))


def test_remarks_on_quality_are_counted_and_copies_and_damage_are_named(config: DeviceConfig) -> None:
    root = Path(config.data.removeprefix("folder:"))
    for name in ("a", "b", "c"):
        recording(root / "lying" / f"still-{name}.csv", 0.0, still=True)
    (root / "standing" / "copy.csv").write_bytes((root / "lying" / "0.csv").read_bytes())
    (root / "standing" / "text.csv").write_text("time,ax,az\n0,1,x\n" * 30)
    (root / "standing" / "photo.png").write_bytes(b"")
    _, report = load.load_for(config, SPEC)
    assert report.remarks == {"channel ax is constant": 3} and report.samples == 12 * 4 + 3 * 4
    rows = {str(row["what"]): str(row["value"]) for row in status.read(Path(config.folder))}
    assert rows["windows"] == "60: lying 36, standing 24"
    assert rows["quality"].startswith("3 recordings: channel ax is constant: lying/still-a.csv")
    assert {"also in the folder of another class", "not a series file"} < report.skipped.keys()
    assert len(report.skipped) == 3 and not any("ax" in note for note in report.notes)


def test_a_release_of_another_kind_is_named_and_the_old_head_serves_on(config: DeviceConfig) -> None:
    home = Path(config.folder)
    install(home, PAYLOAD, manifest())
    fit(config)
    payload = graphs.graph()
    install(home, payload, graphs.manifest_for(payload, release=2, classes=list(CLASSES)))
    for use in (lambda: fit(config, 2), lambda: load.count_for(config, DataSpec(CLASSES, graphs.INPUT))):
        with pytest.raises(
            DataError, match=r"CSV or NPZ recordings \(series\), but the release takes pictures"
        ):
            use()
    assert Predictor(home).manifest.input == SERIES and record.read(home).why == Failure.NO_DATA


def test_the_newest_recordings_are_kept(config: DeviceConfig) -> None:
    root = Path(config.data.removeprefix("folder:"))
    for number in range(6):
        os.utime(root / "lying" / f"{number}.csv", (1e9 + number, 1e9 + number))
        os.utime(root / "standing" / f"{number}.csv", (1e9 + number, 1e9 + number))
    kept = DeviceConfig("watch", config.data, folder=config.folder, keep=4)
    assert load.load_for(kept, SPEC)[1].samples_per_class == (8, 8)


ROWS = "height,width,class,site\n" + "".join(
    f"{1 + n / 50},{2 - n / 50},{'ab'[n % 2]},{n // 4}\n" for n in range(40)
)
TABLE = InputSpec((2,), (0.0, 0.0), (1.0, 1.0), "F", "float32", names=("height", "width"))


@pytest.mark.parametrize("source", ["table:{}", "{}"])
def test_rows_of_a_csv_file_are_samples_with_classes_and_groups(tmp_path: Path, source: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(ROWS + "1,,a,0\n")
    config = DeviceConfig("bench", source.format(path), folder=str(tmp_path / "pi"))
    assert not config.reads_folder
    for spec in (UNKNOWN, DataSpec(("a", "b"), TABLE)):
        data, report = load.load_for(config, spec)
        assert (report.kind, report.classes, report.samples, report.scenes) == ("table", ("a", "b"), 40, 10)
        assert report.local_notes[-1].startswith("1 file: 1 rows with an empty cell")
        groups = [set(part.groups.tolist()) for part in (data.train, data.validation, data.test)]
        assert sum(map(len, groups)) == 10
    with pytest.raises(DataError, match=r"rows, but the extractor takes windows \(series\)"):
        load.load_for(config, SPEC)


def test_arrays_say_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.random.default_rng(0).normal(size=(12, 2, 25)).astype(np.float32), np.arange(12) % 2
    spec = msgspec.json.encode(SERIES).decode()
    np.savez(tmp_path / "x.npz", x=x, y=y, groups=np.arange(12) // 3, input=spec)
    for wanted in (UNKNOWN, SPEC):
        data, report = loaded(f"npz:{tmp_path / 'x.npz'}", wanted)
        assert report.kind == "series" and report.scenes == 4
        assert sum(len(set(part.groups.tolist())) for part in (data.train, data.test, data.validation)) == 4
    stream = SampleStream.of(data, CLASSES, SERIES)  # as of a simulated device
    list(stream)
    assert grouping.count(stream.groups, 12) == 4
    with pytest.raises(DataError, match=r"windows \(series\) at 25 Hz, but the release takes pictures"):
        loaded(f"npz:{tmp_path / 'x.npz'}", DataSpec(CLASSES, graphs.INPUT))
    module = types.SimpleNamespace(given=lambda: (x, y, np.arange(12) // 6))
    monkeypatch.setitem(sys.modules, "of_windows", module)  # type: ignore[arg-type]
    for wanted in (UNKNOWN, SPEC):
        _, report = loaded("python:of_windows:given", wanted)
        assert (report.kind, report.scenes) == ("series", 2)
    with pytest.raises(DataError, match=r"\[2, 24\], the extractor takes"):
        module.given = lambda: (x[:, :, 1:], y)
        loaded("python:of_windows:given", SPEC)
