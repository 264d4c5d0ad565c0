"""`edge-fl new`: a recipe from folders of pictures or a list of classes; it loads and runs as written, and nothing is overwritten."""

import os
import shutil
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_fl.cli import main
from edge_fl.modalities import audio
from edge_fl_server.cli import new
from edge_fl_server.orchestrate import execution
from edge_fl_server.recipes import find
from edge_fl_server.recipes.recipe import parse
from tests.devices.recordings import recordings

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


@pytest.fixture
def watch(tmp_path, monkeypatch):
    """A working folder with recordings of two people in watch/PERSON/CLASS."""
    monkeypatch.chdir(tmp_path)
    for person in ("ann", "bob"):
        recordings(tmp_path / "watch" / person, each=2)
    return tmp_path / "watch"


def test_a_series_has_classes_people_and_an_input_with_mean_and_spread(watch, capsys):
    assert main(["new", "moves", "--series", "watch"]) == 0
    said = capsys.readouterr()
    assert "lying: 4 files" in said.err and "2 devices can have a part each: ann, bob" in said.err
    assert said.out.splitlines()[1].endswith("--data watch/ann")
    ready = execution.prepare(find("moves.toml"))
    spec = ready.spec
    assert (spec.classes, spec.model.name) == (["lying", "standing"], "random-kernels")
    assert (spec.input.shape, spec.input.rate, spec.input.hop) == ((2, 100), 25.0, 50)
    assert (spec.input.names, spec.input.units) == (("ax", "az"), ("g", "g"))
    assert spec.input.mean == pytest.approx((0.0, 0.5), abs=0.05)
    assert spec.input.std == pytest.approx((0.1, 0.5), abs=0.05)
    assert ready.method.net.feature_dim == 1000


def test_window_and_rate_can_be_given_and_a_damaged_file_is_named(watch, capsys):
    (watch / "ann" / "lying" / "odd.csv").write_bytes(b"\0\xff")
    (watch / "ann" / "standing" / "photo.jpg").write_bytes(b"")
    given = ["--window", "2", "--rate", "10", "--model", "cnn1d"]
    assert main(["new", "moves", "--series", "watch", *given]) == 0
    assert find("moves.toml").input.shape == (2, 20)
    said = capsys.readouterr().err
    assert "watch/ann/lying/odd.csv: " in said and "1 pictures are left out" in said
    assert "cnn1d has no pretrained weights" in said


def test_classes_of_a_table_are_in_a_column_or_in_folders(watch, capsys):
    table = Path("iris.csv")
    table.write_text("length,width,species\n1,2,a\n3,4,b\n5,6,b\n")
    assert main(["new", "iris", "--table", "iris.csv"]) == 0
    recipe = find("iris.toml")
    assert (recipe.data.classes, recipe.input.names, recipe.input.mean) == (
        ["a", "b"],
        ("length", "width"),
        (3.0, 4.0),
    )
    (folder := Path("sites")).mkdir()
    for site in ("berlin", "wien"):
        (folder / f"{site}.csv").write_text(table.read_text())
    assert main(["new", "sites", "--table", "sites"]) == 0
    assert capsys.readouterr().out.strip().endswith("--data sites/berlin.csv")
    assert main(["new", "rows", "--table", "watch"]) == 0
    assert find("rows.toml").data.classes == ["lying", "standing"]


def test_audio_brings_clips(watch):
    for name in ("yes", "no"):
        (watch / name).mkdir()
        (watch / name / "1.wav").write_bytes(audio.wav(np.zeros(16000, np.float32), 16000))
    assert main(["new", "words", "--audio", "watch", "--model", "audio-cnn"]) == 0
    assert find("words.toml").input.shape == (16000,)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--series", "nowhere"],
            "nowhere: no such folder; expected one folder of CSV or NPZ recordings per class",
        ),
        (["--series", "watch/ann/lying"], "recordings of 0 classes, expected two or more"),
        (["--series", "one"], "CSV or NPZ recordings of 1 class, expected two or more folders"),
        (["--audio", "watch"], "WAV or FLAC recordings of 0 classes, expected two or more folders"),
        (["--audio", "watch"], "8 CSV or NPZ recordings are left out"),
        (["--series", "untimed"], "no column of times, such as 'time'; state the rate"),
        (["--images", "watch", "--rate", "50"], "--window and --rate cut recordings"),
        (["--series", "watch", "--images", "watch"], "expected either --images FOLDER"),
        (["--series", "watch", "--model", "cnn1"], "did you mean 'cnn1d'?"),
    ],
)
def test_bad_recordings_are_one_line_and_write_nothing(watch, capsys, arguments, said):
    recordings(Path("one"))
    shutil.rmtree("one/lying")
    for name in ("a", "b"):
        (path := Path("untimed", name, "1.csv")).parent.mkdir(parents=True)
        path.write_text("x,y\n" + "1,2\n" * 99)
    assert main(["new", "moves", *arguments]) == 4
    error = capsys.readouterr().err
    assert said in error and not Path("moves.toml").exists()
    assert error.splitlines()[-1].startswith("edge-fl: ")
