"""Names of folders are class names in one Unicode form; similar ones are remarked, series are not."""

import os
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest

from edge_fl.data import datasets
from edge_fl.data.class_names import (
    OUTSIDE,
    UNUSABLE,
    class_of,
    flaw,
    folder_remarks,
    nearest_class,
    outside,
    require_class_names,
    similar,
    similar_remarks,
)
from edge_fl.data.partition import DataConfig
from edge_fl.errors import ConfigError
from edge_fl.files.folder import walk

APART = unicodedata.normalize("NFD", "müll")


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("cat", "cat"),
        (APART, "müll"),
        ("👨\u200d👩\u200d👧", "👨\u200d👩\u200d👧"),
        (os.fsdecode(b"caf\xe9"), ""),
        ("a\nb", ""),
        (" cat", ""),
        ("", ""),
        ("x" * 101, ""),
    ],
)
def test_the_class_of_a_folder(folder: str, name: str) -> None:
    assert class_of(folder) == name


def test_a_folder_is_compared_with_the_classes_in_one_form() -> None:
    assert nearest_class(APART.upper(), ["müll", "glas"]) == "müll"
    assert outside(os.fsdecode(b"caf\xe9"), ["cat", "dog"]) == UNUSABLE
    assert outside("bus", ["cat", "dog"]) == OUTSIDE


def test_names_of_settings_are_composed_and_differ() -> None:
    assert require_class_names([APART, "glas"], "here") == ["müll", "glas"]
    with pytest.raises(ConfigError, match="class 'müll' occurs more than once"):
        require_class_names([APART, "müll"], "here")
    assert DataConfig(classes=[APART, "glas"]).classes == ["müll", "glas"]
    assert not flaw("👨\u200d👩\u200d👧") and flaw("a\u202eb")


@pytest.mark.parametrize(
    "group",
    [
        ["Pear", "pear", "pears"],
        ["hot dog", "hot-dog", "hotdog"],
        ["berries", "berry"],
        ["box", "boxes"],
        ["strawberry", "strawbery"],
        ["kicthen", "kitchen"],
        ["STRASSE", "straße"],
    ],
)
def test_names_that_may_mean_one_class_are_grouped(group: list[str]) -> None:
    assert similar(["zebra", *reversed(group)]) == [group]


@pytest.mark.parametrize(
    "names",
    [
        [f"cat{number}" for number in range(30)],
        ["defect-01", "defect-02", "defect-1"],
        ["category_a", "category_b", "category_c"],
        ["a", "A", "b", "s"],  # characters of a handwriting
        ["horse", "house", "mouse", "moose", "cat", "car", "cart", "bus", "glass"],
        ["left", "right", "male", "female", "on", "off", "open", "closed"],
        ["1", "10", "11", "100"],
    ],
)
def test_series_and_short_words_are_not_similar(names: list[str]) -> None:
    assert similar(names) == []


def test_classes_of_known_datasets_are_not_similar(tmp_path: Path) -> None:
    for each in datasets.listings(tmp_path):
        assert similar(each.classes) == [], each.name


def test_a_remark_names_the_group() -> None:
    assert list(similar_remarks(["pear", "Pear", "plum"])) == [
        "classes 'Pear' and 'pear' are similar; if they are the same, put them in one folder"
    ]
    assert list(similar_remarks(["pears", "pear", "Pear"])) == [
        "classes 'Pear', 'pear' and 'pears' are similar; if they are the same, put them in one folder"
    ]


def test_similar_names_are_found_quickly() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    many = ["".join(pair) * 5 for pair in pairwise(letters * 20)][:1024]
    assert similar([f"{name}{number}" for number, name in enumerate(many)]) == []


def test_remarks_about_a_folder(tmp_path: Path) -> None:
    for name in ("Pear/1.jpg", "pear/1.jpg", "@eaDir/1.jpg", "pear/Thumbs.db", "empty "):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch() if "/" in name else (tmp_path / name).mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")).mkdir()
    assert list(folder_remarks(walk(tmp_path))) == [
        "folder 'caf\\xe9': its name is not UTF-8, so it is no class; rename it",
        "folder 'empty ': its name begins or ends with a space, so it is no class; rename it",
        "classes 'Pear' and 'pear' are similar; if they are the same, put them in one folder",
        "2 folders and files of operating systems were ignored: @eaDir, Thumbs.db",
    ]
