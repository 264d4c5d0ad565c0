"""Folders of PFLlib and LEAF become a dataset and a split file; a pickle is read without running its code."""

import json
import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_fl import cli
from edge_fl.data import datasets
from edge_fl.data.partition import DataConfig, split_clients
from edge_fl.errors import DataError
from edge_fl.inputs import InputSpec
from edge_fl.modalities import pictures
from edge_fl_lab.dataset_files import convert, convert_files
from tests.devices.recordings import recordings

RNG = np.random.default_rng(0)


def pfllib(folder: Path, clients: int = 11, low: float = -1.0) -> dict[str, list[dict[str, np.ndarray]]]:
    """A folder as PFLlib's `save_file` writes it."""
    written: dict[str, list[dict[str, np.ndarray]]] = {}
    for part, n in (("train", 3), ("test", 2)):
        (folder / part).mkdir(parents=True)
        for client in range(clients):
            x = RNG.choice(np.linspace(low, 1, 256), (n, 1, 4, 4)).astype(np.float32)
            content = {"x": x, "y": RNG.integers(0, 3, n)}
            np.savez_compressed(folder / part / f"{client}.npz", data=content)
            written.setdefault(part, []).append(content)
    return written


def leaf(folder: Path, users: dict[str, tuple[int, int]]) -> None:
    """A folder as LEAF's preprocess.sh writes it; sizes of the train and test set by user."""
    for place, part in enumerate(("train", "test")):
        (folder / part).mkdir(parents=True)
        having = {user: sizes[place] for user, sizes in users.items() if sizes[place]}
        data = {
            user: {"x": RNG.random((n, 16)).round(2).tolist(), "y": RNG.integers(0, 3, n).tolist()}
            for user, n in having.items()
        }
        content = {"users": list(having), "num_samples": list(having.values()), "user_data": data}
        (folder / part / f"all_data_0_keep_0_{part}_9.json").write_text(json.dumps(content))


@pytest.mark.parametrize("low", [-1.0, 0.0])
def test_a_pfllib_folder_keeps_every_clients_images_labels_and_sets(tmp_path: Path, low: float) -> None:
    written = pfllib(tmp_path / "MNIST", low=low)
    data, split_csv, left_out = convert(tmp_path / "MNIST", "mine", tmp_path / "data")
    dataset = datasets.load("mine", tmp_path / "data")
    split = split_clients(dataset, DataConfig(split=str(split_csv)), 0)
    assert data.is_file() and left_out == 0 and split.clients == tuple(f"c{n:03d}" for n in range(11))
    for number, client in enumerate(split.clients):
        found = split.client(dataset, client)
        for part in ("train", "test"):
            expected = written[part][number]
            samples = getattr(found, part)
            assert samples.y.tolist() == expected["y"].tolist()
            assert np.allclose(samples.x / 255 * (1 - low) + low, expected["x"], atol=1e-5)
        assert not len(found.validation)


def test_a_leaf_folder_keeps_its_users_and_leaves_out_those_without_test_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    leaf(tmp_path / "femnist", {"f0000_14": (4, 2), "f0001_41": (3, 0), "f0002_7": (5, 1)})
    assert cli.main(["data", "convert", "femnist", "writers"]) == 0
    said = capsys.readouterr()
    assert said.out.split() == [".data/writers.npz", ".data/writers-split.csv"]
    assert "1 clients without training or test samples are left out" in said.err
    dataset = datasets.load("writers", Path(".data"))
    split = split_clients(dataset, DataConfig(split=".data/writers-split.csv"), 0)
    assert dataset.samples.shape == (1, 4, 4) and len(dataset.samples) == 15
    assert split.clients == ("f0000_14", "f0002_7") and list(map(len, split.train)) == [4, 5]
    command = [
        "simulate",
        "--dataset",
        "writers",
        "--set",
        "data.split=.data/writers-split.csv",
        "--rounds",
        "1",
    ]
    assert cli.main([*command, "--method", "fedrep"]) == 0


class Evil:
    """A pickle of this runs a command when it is read."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch ran",)


def test_a_pickle_with_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pfllib(tmp_path / "evil", 1)
    np.savez_compressed(tmp_path / "evil" / "test" / "0.npz", data={"x": Evil(), "y": np.zeros(1, int)})
    with pytest.raises(DataError, match=r"0\.npz: not a file of PFLlib \(names posix\.system\)"):
        convert(tmp_path / "evil", "mine", tmp_path)
    assert not (tmp_path / "ran").exists() and not (tmp_path / "mine.npz").exists()


def test_other_folders_are_one_line(tmp_path: Path) -> None:
    def refused(message: str, folder: str = "d", name: str = "mine") -> None:
        with pytest.raises(DataError, match=message) as raised:
            convert(tmp_path / folder, name, tmp_path / "data")
        assert "\n" not in str(raised.value) and not (tmp_path / "data").exists()

    refused(r"d/train: no \.npz or \.json file; expected the folders train and test")
    refused("expected a name, not a path", name="a/b")
    leaf(tmp_path / "text", {"u": (1, 1)})
    (path,) = (tmp_path / "text" / "train").iterdir()
    path.write_text(json.dumps({"user_data": {"u": {"x": ["some words"], "y": [1]}}}))
    refused("expected pixels; text and file names are not converted", "text")
    path.write_text("{}")
    refused("not a file of LEAF", "text")
    path.write_text(json.dumps({"user_data": {"u": {"x": [[0.5] * 7], "y": [1]}}}))
    refused("expected flat square images", "text")
    leaf(tmp_path / "users", {"a": (2, 0), "b": (0, 2)})
    refused("no client has both training and test samples", "users")
    pfllib(tmp_path / "normalised", 1, low=-2.5)
    refused(r"images range over -\d.*, expected 0\.\.1", "normalised")
    (tmp_path / "normalised" / "train" / "0.npz").write_bytes(b"no archive")
    refused("not a file of PFLlib", "normalised")


def test_folders_of_pictures_become_a_dataset_with_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = RNG.integers(0, 256, (4, 20, 30, 3), np.uint8)
    for number, image in enumerate(x):
        (tmp_path / "pets" / ("dog", "cat")[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "pets" / ("dog", "cat")[number % 2] / f"{number}.png")
    (tmp_path / "pets" / "cat" / "broken.jpg").write_text("no picture")
    arguments = [
        "data",
        "convert",
        str(tmp_path / "pets"),
        "pets",
        "--data-dir",
        str(tmp_path),
        "--size",
        "16",
    ]
    assert cli.main(arguments) == 0
    assert "1 files of another kind, or damaged" in capsys.readouterr().err
    dataset = datasets.load("pets", tmp_path)
    assert dataset.classes == ("cat", "dog") and dataset.samples.y.tolist() == [0, 0, 1, 1]
    fitted = pictures.fit(x[[1, 3, 0, 2]].transpose(0, 3, 1, 2), InputSpec((3, 16, 16)))
    assert np.array_equal(dataset.samples.x, fitted)


def test_folders_of_one_class_in_two_unicode_forms_become_one(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    for row, name in enumerate(("müll", unicodedata.normalize("NFD", "müll"), "glas", "Glas")):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), (row, 0, 0)).save(folder / name / os.fsdecode(b"caf\xe9.png"))
    _, left_out, remarks = convert_files(folder, "waste", tmp_path, size=8)
    assert left_out == 0 and [remark.partition(" are")[0] for remark in remarks] == [
        "classes 'Glas' and 'glas'"
    ]
    dataset = datasets.load("waste", tmp_path)
    assert dataset.classes == ("Glas", "glas", "müll") and sorted(dataset.samples.y) == [0, 1, 2, 2]


def test_recordings_of_people_become_groups_and_domains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for person in ("ann", "bob"):
        recordings(tmp_path / "watch" / person, each=2)
    (tmp_path / "watch" / "ann" / "lying" / "odd.csv").write_bytes(b"\0\xff")
    command = [
        "data",
        "convert",
        str(tmp_path / "watch"),
        "moves",
        "--data-dir",
        str(tmp_path),
        "--window",
        "1",
    ]
    assert cli.main(command) == 0
    said = capsys.readouterr().err
    assert "odd.csv: " in said and "1 files of another kind, or damaged, are left out" in said
    dataset = datasets.load("moves", tmp_path)
    assert (dataset.classes, dataset.domain_names) == (("lying", "standing"), ("ann", "bob"))
    assert dataset.given is not None and dataset.given.form == "series 2x25 at 25 Hz"
    assert dataset.samples.x.shape[0] == 8 * 6  # of 4 s in windows of 1 s that overlap by half
    split = split_clients(dataset, DataConfig(partition="domain", clients=2), 0)
    groups = [set(dataset.samples.groups[rows].tolist()) for rows in (split.train[0], split.test[0])]
    assert not groups[0] & groups[1] and len(groups[0] | groups[1]) == 4
    assert cli.main(["datasets", "list", "--data-dir", str(tmp_path), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["samples"] for row in rows}["moves"] == "series 2x25 at 25 Hz"


def test_rows_with_a_class_column_become_a_dataset_of_sites(tmp_path: Path) -> None:
    for site in ("berlin", "wien"):
        (tmp_path / "sites").mkdir(exist_ok=True)
        (tmp_path / "sites" / f"{site}.csv").write_text("length,species\n1,a\n2,b\n")
    convert_files(tmp_path / "sites", "iris", tmp_path, "table")
    dataset = datasets.load("iris", tmp_path)
    assert (dataset.kind, dataset.domain_names) == ("table", ("berlin", "wien"))
    assert dataset.samples.x.tolist() == [[1.0], [2.0]] * 2 and dataset.samples.y.tolist() == [0, 1, 0, 1]


def test_a_folder_without_pictures_is_rejected(tmp_path: Path) -> None:
    for folder, message in (
        (tmp_path, "pictures of 0 classes"),
        (tmp_path / "none", "no such folder"),
    ):
        with pytest.raises(DataError, match=message):
            convert_files(folder, "pets", tmp_path)
