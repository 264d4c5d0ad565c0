"""Datasets as .npz files, which need no torchvision to read: downloaded with torchvision, or converted from other files.

A dataset that PFLlib or LEAF has split over clients gets a split file, too. Without a network, the original files of a download can be put
into the folder by hand; torchvision then only checks and unpacks them.

FOLDER/CLASS/*                  pictures, CSV or NPZ recordings of sensors, WAV or FLAC files, CSV files of rows; devices read theirs alike
FOLDER/DOMAIN/CLASS/*           the same with a domain for each person, room or site

FOLDER/{train,test}/0.npz       PFLlib: one file per client with {"x", "y"}; pixels 0..1, or -1..1 as its transforms leave them
FOLDER/{train,test}/*.json      LEAF: {"user_data": {user: {"x", "y"}}}; pixels 0..1, flat and square, as of FEMNIST
"""

import io
import json
import os
import pickle  # noqa: TID251  # the format of PFLlib; `_Unpickler` reads only arrays
import socket
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edge_fl.data import split_file
from edge_fl.data.class_names import folder_remarks
from edge_fl.data.samples import Array, Indices, class_ids
from edge_fl.errors import DataError, nearest
from edge_fl.files import npz, user_text
from edge_fl.files.folder import walk
from edge_fl.files.paths import text
from edge_fl.inputs import InputSpec, Kind
from edge_fl.modalities import ABOUT, kind_of_most, pictures
from edge_fl_server import sample_folders

SETS = ("train", "test")
EXPECTED = "expected the folders train and test, with the .npz files of PFLlib or the .json files of LEAF"
SIZE = 224  # of most backbones
MOST_NAMED = 5  # files that cannot be read
NUMPY = {
    (f"numpy{inner}.{module}", name)
    for inner in (".core", "._core")
    for module, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
} | {("numpy", "ndarray"), ("numpy", "dtype")}
"""All that a PFLlib file may name; everything else in a pickle is refused."""

Client = tuple[str, Array, Array]  # name, images, labels


def holds_classes(folder: Path) -> bool:
    """Whether a folder has files by class, not the folders train and test of other formats."""
    return not any(any((folder / part).glob(f"*.{suffix}")) for part in SETS for suffix in ("npz", "json"))


def convert_files(
    folder: Path, name: str, data_dir: Path, kind: Kind | None = None, size: int = SIZE, **chosen: float
) -> tuple[Path, int, tuple[str, ...]]:
    """Write the samples of FOLDER/CLASS or FOLDER/DOMAIN/CLASS to `data_dir`/NAME.npz; those of one recording are a group.

    kind: None for that of most files. size: of pictures, in pixels per side, their centres cut out. chosen: window_s and rate of
    recordings, if they are given. Returns the file, the number of files left out (of another kind, or damaged), and remarks.
    Raises DataError.
    """
    _require_name(name)
    found = sample_folders.find(folder, kind or kind_of_most(walk(folder).files) or "picture")
    input = InputSpec((3, size, size)) if found.kind == "picture" else found.input(**chosen)
    x, names, groups, numbers, unusable = sample_folders.read(found.files, input)
    classes, y = np.unique(names, return_inverse=True)
    if len(classes) < 2:
        raise DataError(
            f"{text(folder)}: usable {ABOUT[found.kind].files} of {len(classes)} classes; expected two or more folders named after classes"
        )
    content = {"x": x, "y": y, "classes": classes}
    if found.domains:
        content["domains"] = np.array([found.files[number].domain for number in numbers])
    if any(groups):
        content["groups"] = np.array(groups)
    if found.kind != "picture":
        content["input"] = np.array(msgspec.json.encode(input).decode())
    data = data_dir / f"{name}.npz"
    data_dir.mkdir(parents=True, exist_ok=True)
    npz.write(data, content)
    left_out = len(found.listing.files) + len(found.listing.skipped) - len(set(numbers))
    return data, left_out, (*unusable[:MOST_NAMED], *found.others, *folder_remarks(found.listing))


def convert(folder: Path, name: str, data_dir: Path) -> tuple[Path, Path, int]:
    """Write `data_dir`/NAME.npz and NAME-split.csv; returns both paths and the number of clients left out.

    A client without training or without test samples is left out: its samples are in the dataset, but unused. Raises DataError.
    """
    _require_name(name)
    clients: dict[str, dict[str, Indices]] = {}
    images, labels, samples = [], [], 0
    for part in SETS:
        for client, x, y in _read(folder / part):
            if len(x) != len(y):
                raise DataError(
                    f"{text(folder / part)}: client {client} has {len(x)} images but {len(y)} labels"
                )
            if not split_file.CLIENT.fullmatch(client):
                raise DataError(
                    f"{text(folder / part)}: client {client!r}, expected A-Z, a-z, 0-9, '.', '_' and '-'"
                )
            clients.setdefault(client, {})[part] = np.arange(samples, samples + len(y))
            images.append(x)
            labels.append(y)
            samples += len(y)
    x, y = _pixels(images, folder), class_ids(np.concatenate(labels), text(folder))
    whole = {
        client: sets for client, sets in clients.items() if all(len(sets.get(part, ())) for part in SETS)
    }
    if not whole:
        raise DataError(
            f"{text(folder)}: no client has both training and test samples, expected at least one"
        )
    data, split = data_dir / f"{name}.npz", data_dir / f"{name}-split.csv"
    data_dir.mkdir(parents=True, exist_ok=True)
    npz.write(data, {"x": x, "y": y})
    split_file.write(
        split, samples, list(whole), {part: [sets[part] for sets in whole.values()] for part in SETS}
    )
    return data, split, len(clients) - len(whole)


def _require_name(name: str) -> None:
    if name != Path(name).name or not name:
        raise DataError(f"dataset {name!r}: expected a name, not a path")


def _read(folder: Path) -> Iterator[Client]:
    of_pfllib = sorted(folder.glob("*.npz"), key=lambda path: (len(path.stem), path.stem))
    of_leaf = sorted(folder.glob("*.json"))
    if not (of_pfllib or of_leaf):
        raise DataError(f"{text(folder)}: no .npz or .json file; {EXPECTED}")
    width = max(3, len(str(len(of_pfllib) - 1)))
    for path in of_pfllib:
        yield f"c{text(path.stem):0>{width}}", *_arrays(_unpickled(path), path, "")
    for path in () if of_pfllib else of_leaf:
        for user, content in _json(path).items():
            x, y = _arrays(content, path, user)
            yield user, _square(x, path), y


def _arrays(content: Any, path: Path, client: str) -> tuple[Array, Array]:
    try:
        x, y = np.asarray(content["x"]), np.asarray(content["y"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"{text(path)}: {client} has no arrays x and y ({error}); {EXPECTED}") from error
    if x.dtype.kind not in "fiu":
        raise DataError(
            f"{text(path)}: x holds {x.dtype}, expected pixels; text and file names are not converted"
        )
    return x, y


def _pixels(images: list[Array], folder: Path) -> Array:
    """Join all clients' images as pictures are stored."""
    if len({x.shape[1:] for x in images}) > 1:
        shapes = " and ".join(sorted({str(list(x.shape[1:])) for x in images}))
        raise DataError(f"{text(folder)}: images of {shapes}, expected one shape")
    x = np.concatenate(images)
    if x.dtype.kind == "f" and x.size and -1 <= x.min() < 0:
        x = (x + 1) / 2  # torchvision's Normalize with mean and std of 0.5
    return pictures.arrays(x, text(folder))


def _square(x: Array, path: Path) -> Array:
    """Flat grey or colour images as [N, H, W] or [N, H, W, 3]."""
    values = x.shape[1] if x.ndim == 2 else 0
    for channels in ((), (3,)):
        side = isqrt(values // (channels[0] if channels else 1))
        if values and side * side * (channels[0] if channels else 1) == values:
            return x.reshape(-1, side, side, *channels)
    raise DataError(f"{text(path)}: x of shape {list(x.shape)}, expected flat square images")


def _json(path: Path) -> dict[str, Any]:
    try:
        users = json.loads(user_text.read(path))["user_data"]
        if not isinstance(users, dict):
            raise TypeError("user_data is no object")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{text(path)}: not a file of LEAF ({type(error).__name__}: {error}); {EXPECTED}"
        ) from error
    return users


class _Unpickler(pickle.Unpickler):
    """Reads NumPy arrays, numbers, lists and dicts; a pickle that names anything else is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NUMPY:
            raise pickle.UnpicklingError(f"names {module}.{name}")
        return super().find_class(module, name)


def _unpickled(path: Path) -> Any:
    """The dict {"x", "y"} in a file of PFLlib, which saves it as a pickled object."""
    try:
        with zipfile.ZipFile(path) as archive:
            file = io.BytesIO(archive.read("data.npy"))
        version = np.lib.format.read_magic(file)
        (np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0)(
            file
        )
        return _Unpickler(file).load().item()
    except (
        OSError,
        zipfile.BadZipFile,
        KeyError,
        ValueError,
        AttributeError,
        EOFError,
        pickle.UnpicklingError,
    ) as error:
        raise DataError(f"{text(path)}: not a file of PFLlib ({error}); {EXPECTED}") from error


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
    x = pictures.arrays(np.asarray(dataset.data), where)
    return x.transpose(0, 1, 3, 2) if origin.transposed else x, class_ids(np.asarray(dataset.targets), where)


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
