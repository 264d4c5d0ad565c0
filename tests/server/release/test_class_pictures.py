"""Pictures of the server, by class, for int8 variants of releases without a run."""

import unicodedata

import pytest
from PIL import Image

from edge_fl.errors import DataError
from edge_fl.inputs import InputSpec
from edge_fl_server.release import quantise
from tests.devices.recordings import SERIES, recordings

INPUT = InputSpec((3, 8, 8))
CLASSES = ("cat", "dog", "horse")


@pytest.fixture
def folder(tmp_path):
    for name, count in (("cat", 8), ("dog", 4), ("zebra", 3)):
        (tmp_path / name).mkdir()
        for number in range(count):
            Image.new("RGB", (20, 12), (10 * number, 0, 0)).save(tmp_path / name / f"{number}.png")
    (tmp_path / "cat" / "broken.png").write_bytes(b"\x89PNG")
    return tmp_path


def test_pictures_of_the_classes_are_resized_and_every_fourth_is_held_out(folder):
    data = quantise.labelled(folder, CLASSES, INPUT)
    assert data.train.shape == (3, 8, 8)
    assert data.train.counts(3).tolist() == [6, 3, 0]
    assert data.validation.counts(3).tolist() == [2, 1, 0]


def test_classes_are_compared_in_one_unicode_form(folder):
    (folder / "dog").rename(folder / unicodedata.normalize("NFD", "müll"))
    data = quantise.labelled(folder, ("cat", "müll"), INPUT)
    assert data.train.counts(2).tolist() == [6, 3]


def test_fewer_than_two_classes_are_one_line(folder):
    with pytest.raises(DataError, match="0 pictures of 0 of the classes cow, pig"):
        quantise.labelled(folder, ("cow", "pig"), INPUT)
    with pytest.raises(DataError, match="no such folder"):
        quantise.labelled(folder / "absent", CLASSES, INPUT)


def test_windows_of_recordings_are_held_out_too(tmp_path):
    data = quantise.labelled(recordings(tmp_path), ("lying", "standing"), SERIES)
    assert data.train.counts(2).tolist() == [18, 18] and data.validation.counts(2).tolist() == [6, 6]
    assert data.train.shape == SERIES.shape
