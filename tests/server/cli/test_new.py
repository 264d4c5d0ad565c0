"""`edge-fl new`: a recipe from folders of pictures or a list of classes; it loads and runs as written, and nothing is overwritten."""

import os
import shutil
import unicodedata

import pytest
from PIL import Image

from edge_fl.cli import main
from edge_fl_server.cli import new
from edge_fl_server.orchestrate import execution
from edge_fl_server.recipes import find
from edge_fl_server.recipes.recipe import parse

SMALL = ["--model", "cnn-tiny"]


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """A working folder with pictures in PICTURES/CLASS, and everything that can be wrong with such a folder."""
    monkeypatch.chdir(tmp_path)
    for place in (
        "cat/1.jpg",
        "cat/2.JPG",
        "dog house/1.png",
        "dog house/.hidden.png",
        "dog house/notes.txt",
        "loose.jpg",
        "farm/horse/1.jpg",
        "farm/cow/1.jpg",
        ".thumbs/1.jpg",
    ):
        (path := tmp_path / "pictures" / place).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".txt":
            path.write_text("not a picture")
        else:
            Image.new("RGB", (12, 8), (9, 9, 9)).save(path)
    (tmp_path / "pictures" / "empty").mkdir()
    return tmp_path / "pictures"


def test_folders_are_compared_in_one_unicode_form_and_similar_ones_are_named(pictures, capsys):
    for name in (unicodedata.normalize("NFD", "müll"), "müll", "Cat", "@eaDir"):
        shutil.copytree(pictures / "cat", pictures / name)
    (pictures / os.fsdecode(b"caf\xe9")).mkdir()
    (pictures / "farm" / "cow").rename(pictures.parent / "birds")
    (pictures / "bird").symlink_to("../birds")
    (pictures / "ghost").symlink_to("nowhere")
    assert main(["new", "pets", "--images", "pictures", *SMALL]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "pictures/ghost: a broken link" in lines
    assert "müll: 4 pictures" in lines and "bird: 1 picture" in lines
    assert "folder 'caf\\xe9': its name is not UTF-8, so it is no class; rename it" in lines
    assert "classes 'Cat' and 'cat' are similar; if they are the same, put them in one folder" in lines
    assert "1 folders and files of operating systems were ignored: @eaDir" in lines
    assert find("pets.toml").data.classes == ["Cat", "bird", "cat", "dog house", "müll"]


def test_classes_are_the_folders_with_pictures_and_everything_else_is_named(pictures, capsys):
    assert main(["new", "pets", "--images", "pictures", *SMALL]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == new.NEXT.format(path="pets.toml", data="PICTURES").splitlines()
    lines = said.err.splitlines()
    assert lines[:2] == ["cat: 2 pictures", "dog house: 1 picture"]
    assert "pictures/empty: no pictures in it, so it is no class" in lines
    assert "pictures/.thumbs: hidden, so it is no class" in lines
    assert any(
        "pictures/farm: pictures one level too deep, in cow, horse;" in line
        and "--images pictures/farm" in line
        for line in lines
    )
    assert any(
        "1 pictures directly in pictures (loose.jpg)" in line and "pictures/CLASS/loose.jpg" in line
        for line in lines
    )
    assert find("pets.toml").data.classes == ["cat", "dog house"]


def test_the_recipe_loads_and_can_run_as_written(pictures):
    assert main(["new", "pets", "--classes", "cat, dog,Pferd 'grün'", *SMALL]) == 0
    ready = execution.prepare(find("pets.toml"))
    assert ready.spec.classes == ["cat", "dog", "Pferd 'grün'"]
    assert (ready.recipe.source, ready.recipe.rounds, ready.recipe.release.heads) == ("none", 0, 1)
    assert ready.spec.input.shape == (3, 64, 64)
    assert parse((pictures.parent / "pets.toml").read_text()).model.train == "none"


def test_nothing_is_overwritten(pictures, capsys):
    (pictures.parent / "pets.toml").write_text("mine")
    assert main(["new", "pets", "--classes", "cat,dog"]) == 4
    assert "pets.toml: exists; expected a new name" in capsys.readouterr().err
    assert (pictures.parent / "pets.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["Pets", "--classes", "cat,dog"], "new Pets: expected a name of a-z, 0-9"),
        (["../pets", "--classes", "cat,dog"], "expected a name of a-z"),
        (["pets"], "expected either --images FOLDER"),
        (["pets", "--images", "pictures", "--classes", "cat,dog"], "expected either --images FOLDER"),
        (["pets", "--classes", "cat"], "1 class (cat), expected 2 to 1024"),
        (["pets", "--classes", "cat,,dog"], "class 2, '', is empty"),
        (["pets", "--classes", "cat,dog,cat"], "class 'cat' occurs more than once"),
        (["pets", "--classes", "cat,dog", "--model", "cnn-tinny"], "did you mean 'cnn-tiny'?"),
        (["pets", "--images", "nowhere"], "nowhere: no such folder"),
        (["pets", "--images", "pictures/cat"], "pictures of 0 classes, expected two or more folders"),
        (["pets", "--images", "pictures/empty"], "pictures of 0 classes"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(pictures, capsys, arguments, said):
    assert main(["new", *arguments]) == 4
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert list(pictures.parent.glob("*.toml")) == []
