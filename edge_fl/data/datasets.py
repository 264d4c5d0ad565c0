"""Datasets by name: `digits` is part of scikit-learn, all others are .npz files in a data folder; no network is used.

A file contains x_train, y_train, x_test, y_test (or x and y), and optionally `classes`; `groups` (groups_train and so on), which no split
cuts; `domains` (domains_train and so on), names per sample; and `input`, an `InputSpec` as JSON, of samples that are not pictures. A file
of an unknown dataset is used under its own name. To add a dataset with its own loader, write a function (data_dir -> Dataset) and a line in
DATASETS.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from edge_fl.data.samples import Array, Dataset, Samples, as_groups, class_ids, numbered
from edge_fl.errors import DataError, brief, nearest
from edge_fl.files import npz
from edge_fl.files.paths import composed, text
from edge_fl.inputs import InputSpec
from edge_fl.untrusted import NOT_JSON, decoder

DOWNLOADABLE = ("cifar10", "cifar100", "emnist", "fashion-mnist", "mnist")
"""Datasets that `edge-fl data download NAME` can fetch with torchvision."""

_DIGITS = tuple(string.digits)
_FASHION = tuple("T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot".split(","))
_CIFAR10 = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())
_PACS = tuple("dog elephant giraffe guitar horse house person".split())
_OFFICE_CALTECH = tuple(
    "back_pack bike calculator headphones keyboard laptop_computer monitor mouse mug projector".split()
)
# the ten classes used by federated benchmarks
_DOMAINNET = tuple("bird feather headphones ice_cream teapot tiger whale windmill wine_glass zebra".split())
DOMAINS = {
    "pacs": ("art_painting", "cartoon", "photo", "sketch"),
    "officecaltech10": ("amazon", "caltech", "dslr", "webcam"),
    "domainnet": ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
    "office-home": ("art", "clipart", "product", "real_world"),
}
"""Domains of the datasets with several, in files `<data_dir>/<name>-<domain>.npz`."""
# the balanced split merges 15 letters that look alike
_EMNIST = (*string.digits, *string.ascii_uppercase, *"abdefghnqrt")
_CIFAR100 = tuple(
    """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle caterpillar
    cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster
    house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree
    orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose
    sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television
    tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm""".split()
)


@dataclass(frozen=True)
class DatasetListing:
    """A dataset that can be named: its classes and domains (empty: not known), whether it is in the data folder, and its `stated_input`."""

    name: str
    classes: tuple[str, ...]
    domains: tuple[str, ...]
    available: bool
    where: str
    input: InputSpec | None = None


def listings(data_dir: Path) -> list[DatasetListing]:
    """The known datasets, then other .npz files in the data folder."""
    known = [_listing(name, data_dir) for name in DATASETS]
    domains = tuple(f"{name}-" for name in DOMAINS)
    others = [
        path
        for path in sorted(data_dir.glob("*.npz"))
        if path.stem not in DATASETS and not path.stem.startswith(domains)
    ]
    return [
        *known,
        *(DatasetListing(p.stem, (), (), True, text(p), stated_input(p.stem, data_dir)) for p in others),
    ]


def stated_input(name: str, data_dir: Path) -> InputSpec | None:
    """What the file of a dataset says of its samples; None for pictures, and for a file that cannot be read."""
    with suppress(DataError):
        path = data_dir / f"{name}.npz"
        return given_input(npz.read(path, ("input",)), path)
    return None


def _listing(name: str, data_dir: Path) -> DatasetListing:
    if name == "digits":
        return DatasetListing(name, _DIGITS, (), True, "scikit-learn")
    make = DATASETS[name]
    classes = make.keywords.get("classes", ()) if isinstance(make, partial) else ()
    pattern = f"{name}-*.npz" if name in DOMAINS else f"{name}.npz"
    found = sorted(data_dir.glob(pattern))
    domains = DOMAINS.get(name, ())
    where = ", ".join(map(text, found)) or f"no {text(data_dir / pattern)}{_remedy(name)}"
    return DatasetListing(name, classes, domains, bool(found), where)


def load(name: str, data_dir: Path) -> Dataset:
    """Load the dataset `name`. Raises DataError, which says where its file was expected and how to get it."""
    if make := DATASETS.get(name):
        return make(data_dir)
    if not name:
        raise DataError(
            "dataset '': expected a name, such as digits, or that of a file NAME.npz in the data folder"
        )
    if name != Path(name).name:
        raise DataError(f"dataset {name!r}: expected a name{nearest(name, DATASETS)}, not a path")
    return from_file(data_dir, name)


def digits(data_dir: Path) -> Dataset:
    """1,797 handwritten digits, 8x8 grey, from scikit-learn; `data_dir` is not used."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return Dataset("digits", Samples.of(digits.images / 16, digits.target, _DIGITS, "digits"), _DIGITS)


def from_file(data_dir: Path, name: str, classes: tuple[str, ...] = ()) -> Dataset:
    """Load `<data_dir>/<name>.npz`. Class names are `classes`, else the file's own, else the class ids. Raises DataError."""
    path = data_dir / f"{name}.npz"
    if not path.is_file():
        lacking = (
            f"no file {text(path)}"
            if data_dir.is_dir()
            else f"no folder {text(data_dir)}, expected {text(path.name)} in it"
        )
        raise DataError(f"dataset {name!r}{_hint(name)}: {lacking}{_remedy(name)}")
    content = npz.read(path)
    names, given = classes or _class_names(content, path), given_input(content, path)
    parts = ["_train", "_test"] if {"x_train", "y_train", "x_test", "y_test"} <= content.keys() else [""]
    if not {f"{key}{part}" for part in parts for key in "xy"} <= content.keys():
        raise DataError(
            f"{text(path)}: holds {', '.join(content) or 'nothing'}; expected x_train, y_train, x_test, y_test, or x and y"
        )
    kind = given.kind if given else "picture"
    groups = _together(content, "groups", parts, path)
    samples = []
    for part in parts:
        where = f"{text(path)} ({part[1:]})" if part else text(path)
        x, y = content[f"x{part}"], content[f"y{part}"]
        samples.append(Samples.of(x, y, names, where, kind, content.get(f"groups{part}")))
    merged = _merged(samples, path)
    if groups is not None:
        merged = replace(merged, groups=as_groups(groups, len(merged), text(path)))
    if given and given.shape != merged.shape:
        raise DataError(
            f"{text(path)}: samples of {list(merged.shape)}, but its input says {list(given.shape)}"
        )
    domains = _together(content, "domains", parts, path)
    domain_names: tuple[str, ...] = ()
    numbers = None
    if domains is not None:
        found, numbers = np.unique(domains.astype(str), return_inverse=True)
        domain_names = tuple(map(str, found))
    held_out = np.repeat([False, True], [len(part) for part in samples]) if len(parts) > 1 else None
    return Dataset(name, merged, names, held_out, numbers, domain_names, given)


def given_input(content: Mapping[str, Array], path: Path) -> InputSpec | None:
    """Return the `input` of a file's arrays; None for pictures. Raises DataError."""
    if "input" not in content:
        return None
    try:
        return decoder(InputSpec).decode(str(content["input"]))
    except NOT_JSON as error:
        raise DataError(f"{text(path)} (input): {brief(error)}; expected an input as JSON") from error


def _together(content: Mapping[str, Array], key: str, parts: Sequence[str], path: Path) -> Array | None:
    """Return an optional array of all parts, one value per sample; None if no part has it. Raises DataError."""
    found = [content.get(f"{key}{part}") for part in parts]
    if all(array is None for array in found):
        return None
    for part, array in zip(parts, found, strict=True):
        if array is None or array.shape != content[f"y{part}"].shape[:1]:
            came = "nothing" if array is None else f"{array.dtype} {list(array.shape)}"
            raise DataError(
                f"{text(path)} ({key}{part}): {came}, expected one value per sample, {len(content[f'y{part}'])}"
            )
    return np.concatenate([array for array in found if array is not None])


def from_domains(data_dir: Path, name: str, classes: tuple[str, ...] = ()) -> Dataset:
    """Load a dataset of several domains from the files present; without `classes` the first file names them."""
    paths = sorted(data_dir.glob(f"{name}-*.npz"))
    if not paths:
        lacking = f"file {text(data_dir)}/{name}-*.npz" if data_dir.is_dir() else f"folder {text(data_dir)}"
        files = ", ".join(f"{name}-{domain}.npz" for domain in DOMAINS[name])
        raise DataError(f"dataset {name!r}: no {lacking}, expected {files}")
    first = from_file(data_dir, paths[0].stem, classes)
    parts = [first, *(from_file(data_dir, path.stem, first.classes) for path in paths[1:])]
    sizes = [len(part.samples) for part in parts]
    held_out = [
        np.zeros(n, bool) if part.original_test is None else part.original_test
        for part, n in zip(parts, sizes, strict=True)
    ]
    return Dataset(
        name,
        _merged([part.samples for part in parts], data_dir / f"{name}-*.npz"),
        first.classes,
        original_test=np.concatenate(held_out),
        domains=np.repeat(np.arange(len(parts)), sizes),
        domain_names=tuple(path.stem.removeprefix(f"{name}-") for path in paths),
    )


DATASETS: dict[str, Callable[[Path], Dataset]] = {
    "digits": digits,
    "mnist": partial(from_file, name="mnist", classes=_DIGITS),
    "fashion-mnist": partial(from_file, name="fashion-mnist", classes=_FASHION),
    "cifar10": partial(from_file, name="cifar10", classes=_CIFAR10),
    "cifar100": partial(from_file, name="cifar100", classes=_CIFAR100),
    "emnist": partial(from_file, name="emnist", classes=_EMNIST),
    "pacs": partial(from_domains, name="pacs", classes=_PACS),
    "officecaltech10": partial(from_domains, name="officecaltech10", classes=_OFFICE_CALTECH),
    "domainnet": partial(from_domains, name="domainnet", classes=_DOMAINNET),
    "office-home": partial(from_domains, name="office-home"),
}


def _merged(parts: list[Samples], path: Path) -> Samples:
    if not sum(map(len, parts)):
        raise DataError(f"{text(path)}: no samples in it")
    shapes = {part.shape for part in parts}
    if len(shapes) > 1:
        raise DataError(
            f"{text(path)}: samples of {' and '.join(str(list(s)) for s in sorted(shapes))}, expected one shape"
        )
    return Samples(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))


def _class_names(content: dict[str, Array], path: Path) -> tuple[str, ...]:
    if "classes" in content:
        names = tuple(composed(str(name).strip()) for name in content["classes"].ravel())
        if not all(names):
            raise DataError(f"{text(path)}: class {names.index('')} has an empty name")
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise DataError(
                f"{text(path)}: class name {repeated[0]!r} occurs more than once, expected different names"
            )
        return names
    keys = [key for key in ("y_train", "y_test", "y") if key in content]
    return numbered(class_ids(content[key], f"{text(path)} ({key})") for key in keys)


def _hint(name: str) -> str:
    return "" if name in DATASETS else nearest(name, DATASETS)


def _remedy(name: str) -> str:
    return (
        f"; fetch it with 'edge-fl data download {name}' or provide the file"
        if name in DOWNLOADABLE
        else "; provide the file"
    )
