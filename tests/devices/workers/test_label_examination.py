"""`edge-fl device doctor --labels`: wrong labels and near duplicates in the folders of two classes, and devices with nothing to examine."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_fl.cli import main
from edge_fl_devices.data.right_labels import RightLabels
from edge_fl_devices.features.feature_rows import file_key
from tests.devices.images import X, Y

Rows = list[dict[str, str]]
EXAMINE = ["device", "doctor", "--labels", "--id", "pi-1", "--format", "json", "--dir"]


def put(path: Path, bright: bool, seed: int) -> None:
    """Write a picture of class b if it is bright, else of a."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 100, (4, 4)) + 150 * bright
    Image.fromarray(pixels.astype(np.uint8)).save(path)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Twelve pictures of each class, and a bright one among the dark ones."""
    for number in range(24):
        put(tmp_path / "data" / "ab"[number % 2] / f"{number}.png", number % 2 == 1, number)
    put(tmp_path / "data" / "a" / "odd.png", True, 99)
    return tmp_path / "data"


def examined(folder: Path, data: object, capsys: pytest.CaptureFixture[str], code: int = 0) -> Rows:
    assert main([*EXAMINE, str(folder), "--data", str(data)]) == code
    found: Rows = json.loads(capsys.readouterr().out)
    return found


def test_a_wrong_label_is_named_with_its_file_class_and_why_until_a_person_calls_it_right(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    first, *_, last = examined(folder, data, capsys)
    assert first["state"] == "warning" and first["found"].startswith(
        "a/odd.png: rather b: the other labels say b"
    )
    assert "if it is b, move it to the folder b" in first["remedy"]
    assert last["check"] == "labels" and " of 25 labels to look at; about " in last["found"]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before  # nothing is changed
    RightLabels(folder).add(file_key(data / "a" / "odd.png"), "a")
    rows = examined(folder, data, capsys)
    assert not [row for row in rows if row["found"].startswith("a/odd.png")]
    RightLabels(folder).undo(file_key(data / "a" / "odd.png"), "a")
    assert examined(folder, data, capsys)[0]["found"].startswith("a/odd.png")


def test_nearly_the_same_picture_in_two_classes_is_named_with_the_other_one(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pixels = np.asarray(Image.open(data / "b" / "1.png")).copy()
    pixels[0, 0] += 1
    Image.fromarray(pixels).save(data / "a" / "again.png")
    shutil.copy(data / "b" / "3.png", data / "a" / "copy.png")
    found = [row["found"] for row in examined(folder, data, capsys)]
    assert any(
        line.startswith("1 also in the folder of another class: b/3.png (the same as a/copy.png")
        for line in found
    )
    assert "a/again.png: rather b: nearly the same picture as b/1.png, which is labelled b" in found


def test_samples_of_an_array_are_named_by_their_numbers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    y = Y.copy()
    y[5] = 0
    np.savez(tmp_path / "data.npz", x=X, y=y)
    rows = examined(folder, tmp_path / "data.npz", capsys)
    assert rows[0]["found"].startswith("sample 6: rather b") and "few labels: 12" in rows[-1]["found"]


def test_labels_of_one_class_are_no_problem(
    folder: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(data / "b")
    (row,) = examined(folder, data, capsys)
    assert row["state"] == "ok" and row["found"].startswith("0 of 13 labels to look at")


def test_without_labels_or_a_release_nothing_is_examined_and_unreadable_data_are_a_failure(
    folder: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none").mkdir()
    (row,) = examined(folder, tmp_path / "none", capsys)
    assert row["state"] == "skipped" and "no usable picture" in row["found"]
    (row,) = examined(folder, tmp_path / "gone.npz", capsys, code=1)
    assert row["state"] == "failed" and "no such file" in row["found"]
    shutil.rmtree(folder / "release")
    (row,) = examined(folder, data, capsys)
    assert row["state"] == "skipped" and "no release is installed yet" in row["found"]
