"""A device's own images: from a folder per class, an .npz, or a Python function; checked, split once, and never sent anywhere.

Which set an image belongs to follows from its pixels and the seed alone: when images are added, none that was tested on is ever trained
on, and copies of one image stay together. To add a source: one function (location, need -> Found) and one line in SOURCES.
"""

from __future__ import annotations

import hashlib
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from devices.config import DeviceConfig
from devices.features.pictures import LIMITS, SUFFIXES, Limits, decode
from edge_fl.config import InputSpec
from edge_fl.data import arrays, npz
from edge_fl.data.samples import Array, ClientData, Samples
from edge_fl.errors import DataError, nearest
from edge_fl.seeds import seed_for

EXAMPLES = 5
RESERVOIR = b"reservoir"
Policy = Literal["newest", "reservoir"]
Data = Callable[[tuple[str, ...], InputSpec], ClientData]
"""The device's own data, for these classes and this input; asked for anew whenever they are needed."""


@dataclass(frozen=True)
class Need:
    """What the images are for: class names in the order of their ids, and the images that the extractor takes.

    Before the first release neither is known: without classes the source's own count, without `input` all images must be of one shape.
    `resize` lets pictures of another size be made to fit. `only` names the classes that this device keeps to, () for all; `keep` is how
    many images it works with at most (0: all), and `policy` which: the newest, or a fair sample of all that ever came (reservoir).
    """

    classes: tuple[str, ...] = ()
    input: InputSpec | None = None
    resize: bool = True
    limits: Limits = LIMITS
    only: tuple[str, ...] = ()
    keep: int = 0
    policy: Policy = "newest"


@dataclass(frozen=True)
class Found:
    """What a source holds: all its samples, or, when the source splits them itself, train, test and perhaps validation samples.

    `skipped` counts files by the reason why they were left out; `examples` names the first of them.
    """

    classes: tuple[str, ...]
    samples: Samples
    validation: Samples | None = None
    test: Samples | None = None
    skipped: Mapping[str, int] = field(default_factory=dict)
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataReport:
    """What was found, in numbers: samples per class (all three sets), the sizes of the sets, and what was skipped and why."""

    source: str
    classes: tuple[str, ...]
    samples_per_class: tuple[int, ...]
    train: int
    validation: int
    test: int
    skipped: Mapping[str, int]
    examples: tuple[str, ...]
    fingerprint: str

    @property
    def samples(self) -> int:
        """Images in all three sets."""
        return self.train + self.validation + self.test

    @property
    def one_class(self) -> bool:
        """Whether only one class occurs; that is allowed, and makes a constant head."""
        return sum(count > 0 for count in self.samples_per_class) == 1

    @property
    def notes(self) -> list[str]:
        """What whoever looks after the device should know; no file names, because notes are sent."""
        notes = [f"{count} files skipped: {reason}" for reason, count in sorted(self.skipped.items())]
        return [*notes, "one_class"] if self.one_class else notes


def load(
    source: str,
    need: Need = Need(),
    *,
    seed: int = 0,
    client: str = "",
    test_fraction: float = 0.25,
    validation_fraction: float = 0.1,
) -> tuple[ClientData, DataReport]:
    """A device's images, split. `source` is KIND:LOCATION with a kind of SOURCES, or simply a folder or an .npz.

    Raises DataError: nothing there, fewer than two images, images that the extractor does not take, labels outside the class list.
    """
    kind, location = _parsed(source)
    found = chosen(SOURCES[kind](location, need), need)
    if found.test is None:
        data = split(found.samples, test_fraction, validation_fraction, seed=seed, client=client)
    else:
        data = ClientData(
            found.samples, found.validation or found.samples.take(np.empty(0, np.int64)), found.test
        )
    if need.input:
        _require_shape(data.train, need.input, source)
    counts = [part.counts(len(found.classes)) for part in (data.train, data.validation, data.test)]
    report = DataReport(
        source,
        found.classes,
        tuple(np.sum(counts, axis=0).tolist()),
        len(data.train),
        len(data.validation),
        len(data.test),
        found.skipped,
        found.examples,
        data.fingerprint(),
    )
    return data, report


def split(
    samples: Samples, test_fraction: float, validation_fraction: float, *, seed: int = 0, client: str = ""
) -> ClientData:
    """Two or more samples as train, validation and test set, by a keyed hash of each image; train and test get one each at least.

    The shares hold on average; `validation_fraction` is of what is not tested on. Raises DataError for fewer than two samples.
    """
    if len(samples) < 2:
        raise DataError(
            f"{len(samples)} usable image, expected 2 or more (one to train, one to test); nothing was loaded"
        )
    key = seed_for(seed, "partition", client=client).to_bytes(8, "big")
    place = np.array([_place(image, key) for image in samples.x])
    last = len(samples) - 1
    tests = min(max(int(np.sum(place < test_fraction)), 1), last)
    untrained = int(np.sum(place < test_fraction + (1 - test_fraction) * validation_fraction))
    test, validation, train = np.split(
        np.argsort(place, kind="stable"), [tests, min(max(untrained, tests), last)]
    )
    return ClientData(*(samples.take(np.sort(part)) for part in (train, validation, test)))


def of(config: DeviceConfig) -> Data:
    """A device's own data, read from its source whenever they are asked for."""

    def data(classes: tuple[str, ...], input: InputSpec) -> ClientData:
        return load_for(config, Need(classes, input))[0]

    return data


def load_for(config: DeviceConfig, need: Need) -> tuple[ClientData, DataReport]:
    """The data that a device's settings name. Raises DataError."""
    return load(
        config.data,
        replace(need, only=tuple(config.classes), keep=config.keep, policy=config.policy),
        seed=config.seed,
        client=config.id,
        test_fraction=config.test_fraction,
        validation_fraction=config.validation_fraction,
    )


def folder(location: str, need: Need) -> Found:
    """`<location>/<class name>/*.png|jpg|...`; files that are no pictures, or in a folder that is no class, are skipped and counted."""
    root = Path(location)
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; expected one folder per class in it; nothing was loaded")
    classes = need.classes or tuple(
        sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    )
    skipped: Counter[str] = Counter()
    examples: list[str] = []
    pictures: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    for path in _bounded(_files(root), need):
        reason = _unfit(path, root, classes, need.only)
        picture = None if reason else decode(path, need.input, resize=need.resize, limits=need.limits)
        if picture is None:
            skipped[reason or "unreadable"] += 1
            examples.append(str(path.relative_to(root)))
            continue
        if pictures and picture.shape != pictures[0].shape:
            raise DataError(
                f"{path}: {list(picture.shape)}, but the first image is {list(pictures[0].shape)}; expected one shape; nothing was loaded"
            )
        if len(pictures) >= need.limits.max_images or len(pictures) * picture.size >= need.limits.max_bytes:
            raise DataError(
                f"{root}: more than {len(pictures)} images; at most {need.limits}; nothing was loaded"
            )
        pictures.append(picture)
        labels.append(classes.index(path.parent.name))
    if not pictures:
        why = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "no files"
        raise DataError(
            f"{root}: no usable image ({why}); expected pictures in {arrays.shortened(classes) or 'a folder per class'}; nothing was loaded"
        )
    return Found(
        classes,
        Samples(np.stack(pictures), np.array(labels, np.int64)),
        None,
        None,
        skipped,
        tuple(examples[:EXAMPLES]),
    )


def archive(location: str, need: Need) -> Found:
    """An .npz with x and y, or x_train, y_train, x_test, y_test (and x_validation, y_validation): then its own split is kept."""
    found = npz.read(Path(location))
    train = ("x", "y") if {"x", "y"} <= found.keys() else ("x_train", "y_train")
    if not set(train) <= found.keys():
        raise DataError(
            f"{location}: holds {', '.join(found) or 'nothing'}; expected x and y, or x_train and y_train; nothing was loaded"
        )
    own = {
        part: (f"x_{part}", f"y_{part}")
        for part in ("validation", "test")
        if {f"x_{part}", f"y_{part}"} <= found.keys()
    }
    classes = need.classes or _names([found[y] for _, y in (train, *own.values())], location)
    parts = {
        part: arrays.samples(found[x], found[y], classes, f"{location} ({x})") for part, (x, y) in own.items()
    }
    samples = arrays.samples(found[train[0]], found[train[1]], classes, f"{location} ({train[0]})")
    if not len(samples) or ("test" in parts and not len(parts["test"])):
        raise DataError(f"{location}: no samples to train or to test on; nothing was loaded")
    if len({part.shape for part in (samples, *parts.values())}) > 1:
        raise DataError(
            f"{location}: train, validation and test images differ in shape; expected one; nothing was loaded"
        )
    return Found(classes, samples, parts.get("validation"), parts.get("test"))


def function(location: str, need: Need) -> Found:
    """`package.module:function` on the Python path; called without arguments, it gives (x, y) in any form that an .npz may have."""
    module, _, name = location.partition(":")
    where = f"python:{location}"
    try:
        x, y = getattr(importlib.import_module(module), name)()
    except Exception as error:  # it is somebody else's code: whatever it raises is their answer
        raise DataError(
            f"{where}: {type(error).__name__}: {error}; expected package.module:function that returns (x, y); nothing was loaded"
        ) from error
    x, y = np.asarray(x), np.asarray(y)
    classes = need.classes or _names([y], where)
    return Found(classes, arrays.samples(x, y, classes, where))


SOURCES: dict[str, Callable[[str, Need], Found]] = {"folder": folder, "npz": archive, "python": function}


def _parsed(source: str) -> tuple[str, str]:
    kind, _, location = source.partition(":")
    if location and kind in SOURCES:
        return kind, location
    if source.endswith(".npz") or Path(source).is_dir():
        return "npz" if source.endswith(".npz") else "folder", source
    raise DataError(
        f"data source {source!r}: expected a folder, an .npz, or KIND:LOCATION{nearest(kind, SOURCES)}; nothing was loaded"
    )


def chosen(found: Found, need: Need) -> Found:
    """What of a source this device works with: its classes, and no more images than it keeps. Raises DataError when none is left."""
    ids = [number for number, name in enumerate(found.classes) if not need.only or name in need.only]
    kept = found.samples.take(np.flatnonzero(np.isin(found.samples.y, ids)))
    skipped = Counter(found.skipped)
    if left := len(found.samples) - len(kept):
        skipped["of a class that this device leaves out"] += left
    if need.keep and len(kept) > need.keep:
        skipped["beyond the images that this device keeps"] += len(kept) - need.keep
        places = [_place(image, RESERVOIR) for image in kept.x] if need.policy == "reservoir" else None
        rows = (
            np.argsort(places, kind="stable")[: need.keep] if places else np.arange(len(kept))[-need.keep :]
        )
        kept = kept.take(np.sort(rows))
    if not len(kept):
        raise DataError(
            f"no image is left of {', '.join(need.only)}; the source has {arrays.shortened(found.classes)}; nothing was loaded"
        )
    others = (
        part and part.take(np.flatnonzero(np.isin(part.y, ids))) for part in (found.validation, found.test)
    )
    validation, test = others
    return replace(found, samples=kept, validation=validation, test=test, skipped=skipped)


def _bounded(files: Iterator[Path], need: Need) -> list[Path]:
    """The pictures worth reading, newest or fairest, in the order of the disk; what is no picture stays in, to be counted.

    Names are hashed for the fair sample: the `keep` smallest hashes are a reservoir that needs no memory of what came before.
    """
    every = list(files)
    pictures = [path for path in every if path.suffix.lower() in SUFFIXES]
    if not need.keep or len(pictures) <= need.keep:
        return every
    age: Callable[[Path], float] = (
        (lambda path: -path.stat().st_mtime_ns)
        if need.policy == "newest"
        else (lambda path: _name_place(path))
    )
    kept = set(sorted(pictures, key=age)[: need.keep])
    return [path for path in every if path in kept or path.suffix.lower() not in SUFFIXES]


def stamp(source: str) -> str:
    """Changes whenever a folder or an .npz may have; "" for a function, which nobody can watch. Raises DataError."""
    kind, location = _parsed(source)
    if kind == "python":
        return ""
    root, total = Path(location), hashlib.blake2b(digest_size=16)
    for path in [root] if kind == "npz" else _files(root):
        with suppress(OSError):
            found = path.stat()
            total.update(f"{path} {found.st_size} {found.st_mtime_ns}\n".encode())
    return total.hexdigest()


def _name_place(path: Path) -> float:
    name = f"{path.parent.name}/{path.name}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8, key=RESERVOIR).digest(), "big") / 2**64


def _files(root: Path) -> Iterator[Path]:
    """Files below `root`, in an order that does not depend on the disk."""
    return (path for path in sorted(root.rglob("*")) if path.is_file() and not path.name.startswith("."))


def _unfit(path: Path, root: Path, classes: tuple[str, ...], only: tuple[str, ...]) -> str:
    if path.parent.parent != root:
        return "not directly in a class folder"
    if path.parent.name not in classes:
        return "in a folder that is not in the class list"
    if only and path.parent.name not in only:
        return "of a class that this device leaves out"
    return "" if path.suffix.lower() in SUFFIXES else "not a picture file"


def _names(labels: list[Array], where: str) -> tuple[str, ...]:
    """Class ids as names, up to the highest."""
    highest = (int(ids.max()) for ids in (arrays.class_ids(y, where) for y in labels) if len(ids))
    return tuple(map(str, range(1 + max(highest, default=0))))


def _place(image: Array, key: bytes) -> float:
    digest = hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=8, key=key).digest()
    return int.from_bytes(digest, "big") / 2**64


def _require_shape(samples: Samples, expected: InputSpec, source: str) -> None:
    if samples.shape != expected.shape:
        raise DataError(
            f"{source}: images of {list(samples.shape)}, the extractor takes {list(expected.shape)} [C, H, W]; nothing was loaded"
        )
