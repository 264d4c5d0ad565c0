"""Datasets come by name from scikit-learn or from an .npz; whatever is wrong with a file is one line."""

import os
import pickle
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge_fl.data import datasets
from edge_fl.errors import DataError
from edge_fl.files import npz
from edge_fl.inputs import InputSpec

DATA = Path(os.environ.get("EDGE_FL_DATA", ".data"))


def images(n: int = 4) -> np.ndarray:
    return np.arange(n * 4, dtype=np.uint8).reshape(n, 2, 2)


def test_digits_are_real_grey_images_with_the_full_range() -> None:
    found = datasets.load("digits", Path("nowhere"))
    assert found.samples.x.shape == (1797, 1, 8, 8)
    assert (found.samples.x.min(), found.samples.x.max()) == (0, 255)
    assert found.samples.counts(10).sum() == 1797
    assert found.classes == tuple("0123456789")


def test_a_file_with_train_and_test_is_merged_and_remembers_which_was_which(tmp_path: Path) -> None:
    npz.write(
        tmp_path / "mnist.npz",
        {"x_train": images(3), "y_train": np.array([0, 1, 2]), "x_test": images(1), "y_test": np.array([9])},
    )
    found = datasets.load("mnist", tmp_path)
    assert found.samples.y.tolist() == [0, 1, 2, 9]
    assert found.original_test is not None
    assert found.original_test.tolist() == [False, False, False, True]


def test_an_own_file_is_a_dataset_under_its_own_name(tmp_path: Path) -> None:
    npz.write(tmp_path / "screws.npz", {"x": images(), "y": np.array([0, 1, 1, 2])})
    assert datasets.load("screws", tmp_path).classes == ("0", "1", "2")
    npz.write(
        tmp_path / "screws.npz",
        {"x": images(), "y": np.array([0, 1, 1, 0]), "classes": np.array(["good", "bent"])},
    )
    assert datasets.load("screws", tmp_path).classes == ("good", "bent")


def test_pacs_brings_its_domains(tmp_path: Path) -> None:
    for name, n in (("photo", 2), ("cartoon", 3)):
        npz.write(tmp_path / f"pacs-{name}.npz", {"x": images(n), "y": np.arange(n)})
    found = datasets.load("pacs", tmp_path)
    assert found.domain_names == ("cartoon", "photo")
    assert found.domains is not None
    assert found.domains.tolist() == [0, 0, 0, 1, 1]
    assert datasets.load("pacs-photo", tmp_path).classes == ("0", "1")


def test_an_unknown_name_lists_the_known_ones_and_where_a_file_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'zebra' \(known: .*digits.*pacs\): no file .*zebra\.npz"):
        datasets.load("zebra", tmp_path)
    with pytest.raises(DataError, match=r"did you mean 'cifar10'\?"):
        datasets.load("cifar-10", tmp_path)


def test_a_dataset_that_is_not_there_yet_names_the_command_that_brings_it(tmp_path: Path) -> None:
    for name in datasets.DOWNLOADABLE:
        with pytest.raises(
            DataError, match=rf"no file .*{name}\.npz; fetch it with .edge-fl data download {name}."
        ):
            datasets.load(name, tmp_path)
    with pytest.raises(DataError, match="pacs-photo"):
        datasets.load("pacs", tmp_path)


def test_a_name_that_is_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a path"):
        datasets.load("../secrets", tmp_path)


def test_a_label_beyond_the_known_classes_is_refused(tmp_path: Path) -> None:
    npz.write(tmp_path / "mnist.npz", {"x": images(), "y": np.array([0, 1, 2, 10])})
    with pytest.raises(DataError, match=r"mnist\.npz: label 10 at index 3"):
        datasets.load("mnist", tmp_path)


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    npz.write(path, {"x": images(), "y": np.arange(4)})
    whole = path.read_bytes()
    broken = {
        "empty": b"",
        "text": b"these are no arrays",
        "cut": whole[: len(whole) // 2],
        "damaged": whole[:60] + bytes(20) + whole[80:],
        "pickle": pickle.dumps([1]),
    }
    for name, content in broken.items():
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"mine\.npz: not a readable \.npz"):
            datasets.load("mine", tmp_path)
            pytest.fail(f"{name} was read")


def test_python_objects_in_a_file_are_never_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "mine.npz", x=np.array([print, 1], dtype=object), y=np.arange(2))
    with pytest.raises(DataError, match=r"mine\.npz: not a readable \.npz .*allow_pickle"):
        datasets.load("mine", tmp_path)
    with pytest.raises(DataError, match="Python objects"):
        npz.write(tmp_path / "other.npz", {"x": np.array([print], dtype=object)})


def test_a_lone_array_is_not_an_archive(tmp_path: Path) -> None:
    with (tmp_path / "mine.npz").open("wb") as file:
        np.save(file, images())
    with pytest.raises(DataError, match="not a readable"):
        datasets.load("mine", tmp_path)


def test_wrong_keys_unequal_lengths_and_no_samples_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    npz.write(path, {"images": images()})
    with pytest.raises(DataError, match="holds images; expected x_train"):
        datasets.load("mine", tmp_path)
    npz.write(path, {"x": images(), "y": np.arange(3)})
    with pytest.raises(DataError, match="4 pictures but 3 labels"):
        datasets.load("mine", tmp_path)
    npz.write(path, {"x": images(0), "y": np.arange(0)})
    with pytest.raises(DataError, match="no samples"):
        datasets.load("mine", tmp_path)
    npz.write(
        path,
        {
            "x_train": images(),
            "y_train": np.arange(4),
            "x_test": np.zeros((1, 3, 3), np.uint8),
            "y_test": np.array([0]),
        },
    )
    with pytest.raises(DataError, match="one shape"):
        datasets.load("mine", tmp_path)


@pytest.mark.skipif(
    not (DATA / "fashion-mnist.npz").is_file(), reason=f"no fashion-mnist.npz in {DATA} (set EDGE_FL_DATA)"
)
def test_real_fashion_mnist_has_its_published_statistics() -> None:
    found = datasets.load("fashion-mnist", DATA)
    assert found.samples.counts(10).tolist() == [7000] * 10
    assert found.input.mean + found.input.std == pytest.approx((0.2860, 0.3530), abs=1e-4)


def test_missing_folders_empty_names_and_repeated_class_names_are_one_line_each(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no folder .*nowhere, expected mnist\.npz in it; fetch it"):
        datasets.load("mnist", tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no folder .*nowhere, expected pacs-art_painting\.npz"):
        datasets.load("pacs", tmp_path / "nowhere")
    with pytest.raises(DataError, match="dataset '': expected a name"):
        datasets.load("", tmp_path)
    for classes, flaw in (
        (["good", "good"], "'good' occurs more than once"),
        (["good", " "], "class 1 has an empty name"),
    ):
        npz.write(
            tmp_path / "screws.npz",
            {"x": images(), "y": np.array([0, 1, 1, 0]), "classes": np.array(classes)},
        )
        with pytest.raises(DataError, match=flaw):
            datasets.load("screws", tmp_path)


def test_a_file_of_a_series_brings_its_input_groups_and_domains(tmp_path: Path) -> None:
    given = InputSpec((2, 4), (0.0, 0.0), (1.0, 1.0), "CT", "float32", rate=50.0, hop=2, names=("x", "y"))
    x = np.random.default_rng(0).normal(3, 2, (6, 2, 4))
    arrays = {"x": x, "y": np.arange(6) % 2, "input": np.array(msgspec.json.encode(given).decode())}
    people, groups = np.array(list("aabbcc")), np.array(["r1", "r1", "r2", "r2", "", ""])
    npz.write(tmp_path / "steps.npz", {**arrays, "domains": people, "groups": groups})
    found = datasets.load("steps", tmp_path)
    assert found.kind == "series" and found.domain_names == ("a", "b", "c")
    assert found.input == msgspec.structs.replace(given, mean=found.input.mean, std=found.input.std)
    assert found.input.mean == pytest.approx(x.mean((0, 2)), abs=1e-5)
    assert found.input.std == pytest.approx(x.std((0, 2)), abs=1e-5)
    assert len(np.unique(found.samples.groups)) == 4 and found.samples.groups[0] == found.samples.groups[1]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("input", np.array("{}"), r"steps.npz \(input\): .*shape"),
        (
            "input",
            np.array('{"shape": [2, 9], "axes": "CT", "dtype": "float32", "rate": 1, "hop": 1}'),
            r"\[2, 9\]",
        ),
        ("groups", np.zeros(3, np.int64), r"\(groups\): int64 \[3\], expected one value per sample, 6"),
        ("groups", np.zeros(6), "groups are float64"),
        ("domains", np.array(["a"]), r"\(domains\): .*expected one value per sample, 6"),
    ],
)
def test_a_wrong_input_group_or_domain_is_refused(
    tmp_path: Path, key: str, value: np.ndarray, message: str
) -> None:
    given = InputSpec((2, 4), (0.0, 0.0), (1.0, 1.0), "CT", "float32", rate=50.0, hop=2)
    arrays = {
        "x": np.zeros((6, 2, 4)),
        "y": np.arange(6) % 2,
        "input": np.array(msgspec.json.encode(given).decode()),
    }
    npz.write(tmp_path / "steps.npz", {**arrays, key: value})
    with pytest.raises(DataError, match=message):
        datasets.load("steps", tmp_path)
