"""Downloads give .npz files that edge-fl reads; without a network the error says where to put the files."""

import shutil
import socket
from pathlib import Path

import numpy as np
import pytest

from edge_fl.data import datasets
from edge_fl.errors import DataError
from edge_fl_lab import dataset_files

ORIGINALS = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.skipif(
    not (ORIGINALS / "MNIST" / "raw").is_dir(), reason=f"the original MNIST files are not in {ORIGINALS}"
)
def test_original_files_in_the_folder_are_converted_without_a_network(tmp_path: Path, offline: None) -> None:
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    for file in (ORIGINALS / "MNIST" / "raw").iterdir():
        shutil.copyfile(file, tmp_path / "MNIST" / "raw" / file.name)
    path = dataset_files.download("mnist", tmp_path)
    found = datasets.load("mnist", tmp_path)
    assert path == tmp_path / "mnist.npz"
    assert found.samples.x.shape == (70_000, 1, 28, 28)
    assert found.samples.y[:5].tolist() == [5, 0, 4, 1, 9]
    assert found.input.mean == pytest.approx((0.1307,), abs=1e-4)


def test_without_a_network_the_error_says_where_files_can_be_put(tmp_path: Path, offline: None) -> None:
    with pytest.raises(
        DataError, match=r"could not be downloaded .*FashionMNIST/raw, or a fashion-mnist\.npz into"
    ):
        dataset_files.download("fashion-mnist", tmp_path)
    assert not list(tmp_path.glob("*.npz*"))


def test_a_file_already_there_is_kept(tmp_path: Path, offline: None) -> None:
    (tmp_path / "cifar10.npz").write_bytes(b"mine")
    assert dataset_files.download("cifar10", tmp_path).read_bytes() == b"mine"


def test_an_unknown_dataset_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'cifar10'"):
        dataset_files.download("cifar-10", tmp_path)


def test_the_downloadable_datasets_are_those_that_edge_fl_names() -> None:
    assert set(dataset_files.ORIGINS) == set(datasets.DOWNLOADABLE)


def test_transposed_images_are_transposed_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Transposed:  # stands for torchvision's EMNIST, whose files are not at hand
        def __init__(self, root: str, *, train: bool, download: bool, split: str) -> None:
            self.data, self.targets = np.zeros((1, 2, 3), np.uint8), np.array([46])
            self.data[0, 0, 2] = 9

    monkeypatch.setattr("torchvision.datasets.EMNIST", Transposed)
    dataset_files.download("emnist", tmp_path)
    found = datasets.load("emnist", tmp_path)
    assert found.samples.shape == (1, 3, 2)
    assert found.samples.x[0, 0, 2, 0] == 9
    assert found.classes[found.samples.y[0]] == "t"
