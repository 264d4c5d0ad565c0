"""The features that a fit of the agent takes from the label page's pictures without a label."""

from pathlib import Path

import numpy as np
import pytest

from edge_fl_devices.config import POOL
from edge_fl_devices.data.file_index import Origin
from edge_fl_devices.features import feature_rows
from edge_fl_devices.features.feature_rows import LABELLING, FeatureRows, file_key, of_pool

SHA256, DIM = "a" * 64, 3
PLACE = Origin(0.0, certain=False)


def picture(home: Path, name: str, folder: str = POOL) -> Path:
    (home / folder).mkdir(exist_ok=True)
    path = home / folder / name
    path.write_bytes(name.encode())
    return path


def known(home: Path, *files: Path) -> FeatureRows:
    """What the label page has computed: the features of a picture are its number."""
    rows = FeatureRows(home / LABELLING, SHA256, DIM)
    for number, file in enumerate(files):
        thumbnail = np.zeros(feature_rows.grouping.SIDE**2, np.uint8)
        rows.add(file_key(file), np.full((1, DIM), number, np.float32), thumbnail, PLACE)
    return rows


def numbers(home: Path, extractor: str = SHA256) -> list[int]:
    found = of_pool(home, extractor, DIM)
    assert found.dtype == np.float32 and found.shape[1:] == (DIM,)
    return [int(row[0]) for row in found]


def test_it_is_the_pictures_of_the_pool_whose_features_are_known_by_name(tmp_path: Path) -> None:
    b, a, moved = picture(tmp_path, "b.png"), picture(tmp_path, "a.jpg"), picture(tmp_path, "c.png")
    labelled = picture(tmp_path, "d.png", "cat")
    index = picture(tmp_path, "index.jsonl")
    rows = known(tmp_path, b, a, moved, labelled, index)
    picture(tmp_path, "new.png")
    moved.rename(tmp_path / "cat" / "c.png")  # labelled
    with rows.path.open("ab") as file:
        file.write(b"torn")
    assert numbers(tmp_path) == [1, 0]
    assert numbers(tmp_path, "b" * 64) == []


def test_a_device_without_a_label_page_has_none(tmp_path: Path) -> None:
    assert numbers(tmp_path) == []
    picture(tmp_path, "a.png")
    assert numbers(tmp_path) == []


def test_no_more_than_the_limit_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_rows, "MOST_UNLABELLED", 2)
    known(tmp_path, *(picture(tmp_path, f"{number}.png") for number in range(5)))
    assert numbers(tmp_path) == [0, 1]


def test_a_copy_of_a_recording_is_of_its_scene(tmp_path: Path) -> None:
    rows, z = FeatureRows(tmp_path, SHA256, DIM), np.arange(6 * DIM, dtype=np.float32).reshape(6, DIM)
    thumbnails = np.zeros((3, feature_rows.grouping.SIDE**2), np.uint8)
    for key, of_file in ((b"a", z[:3]), (b"b", z[3:]), (b"c", z[:3])):
        rows.add(key * 16, of_file, thumbnails, PLACE)
    keys = [key * 16 for key in (b"a", b"b", b"c")]
    groups = feature_rows.read_groups(rows.path, DIM, rows.rows(keys), "series")
    assert feature_rows.grouping.numbers(groups, 9).tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0]
