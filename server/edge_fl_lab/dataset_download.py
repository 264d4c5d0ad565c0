"""Download datasets with torchvision and store them as .npz files, which need no torchvision to read.

Without a network, the original files can be put into the folder by hand; torchvision then only checks and unpacks them.
"""

import os
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_fl.data import arrays, npz
from edge_fl.data.samples import Array
from edge_fl.errors import DataError, nearest
from edge_fl.files.paths import text

NETWORK_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class DatasetOrigin:
    """Source of a dataset: its torchvision class, the folder where the class expects the files, and its further arguments."""

    torchvision: str
    folder: str
    arguments: tuple[tuple[str, str], ...] = ()
    transposed: bool = False  # the files hold every image transposed


ORIGINS: dict[str, DatasetOrigin] = {
    "mnist": DatasetOrigin("MNIST", "MNIST/raw"),
    "fashion-mnist": DatasetOrigin("FashionMNIST", "FashionMNIST/raw"),
    "emnist": DatasetOrigin("EMNIST", "EMNIST/raw", (("split", "balanced"),), transposed=True),
    "cifar10": DatasetOrigin("CIFAR10", "."),
    "cifar100": DatasetOrigin("CIFAR100", "."),
}


def download(name: str, data_dir: Path) -> Path:
    """Download a dataset to `<data_dir>/<name>.npz` and return that path; an existing file is kept.

    Raises DataError for an unknown name and for a failed download. CIFAR's original files are pickles; torchvision opens them only if their
    checksums match.
    """
    origin = ORIGINS.get(name)
    if origin is None:
        raise DataError(f"dataset {name!r}: cannot be downloaded{nearest(name, ORIGINS)}")
    target = data_dir / f"{name}.npz"
    if target.is_file():
        return target
    data_dir.mkdir(parents=True, exist_ok=True)
    train, test = (_fetch(name, origin, data_dir, train=train) for train in (True, False))
    contents = {"x_train": train[0], "y_train": train[1], "x_test": test[0], "y_test": test[1]}
    npz.write(target, contents, compress=False)
    return target


def _fetch(name: str, origin: DatasetOrigin, data_dir: Path, *, train: bool) -> tuple[Array, Array]:
    import torchvision.datasets  # takes seconds to import

    dataset_class: Callable[..., Any] = getattr(torchvision.datasets, origin.torchvision)
    try:
        with _bounded_network():
            dataset = dataset_class(os.fspath(data_dir), train=train, download=True, **dict(origin.arguments))
    except (OSError, RuntimeError, ValueError, EOFError, zlib.error) as error:
        # no network, or damaged files
        raise DataError(
            f"dataset {name!r}: could not be downloaded ({_first_line(error)}); put its original files into"
            f" {text((data_dir / origin.folder).resolve())}, or a {name}.npz into {text(data_dir.resolve())}"
        ) from error
    where = f"{name} from torchvision"
    x = arrays.pixels(np.asarray(dataset.data), where)
    return x.transpose(0, 1, 3, 2) if origin.transposed else x, arrays.class_ids(
        np.asarray(dataset.targets), where
    )


@contextmanager
def _bounded_network() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(NETWORK_TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
