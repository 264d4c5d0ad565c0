"""Data sources of a device: a folder per class, an .npz file, or a Python function; of them the images that its settings select.

To add a source: one function (location, spec -> SourceData) in SOURCES, and its kind in `location.KINDS`.
"""

from __future__ import annotations

import filecmp
import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs

from edge_fl.data.class_names import class_of, folder_remarks, nearest_class, outside
from edge_fl.data.grouping import Groups
from edge_fl.data.samples import Array, Indices, Samples, class_ids
from edge_fl.errors import DataError, NoLabelsError, shortened
from edge_fl.files import npz
from edge_fl.files.folder import UNREADABLE, unusable, walk
from edge_fl.files.paths import raw, text
from edge_fl.inputs import InputSpec
from edge_fl.modalities import ABOUT, UnusableFileError, pictures
from edge_fl.modalities.limits import UNKNOWN_DEPTH, Depth
from edge_fl.threads import ahead
from edge_fl_devices.child import Progress, ignore
from edge_fl_devices.data.decoding_marker import FATAL, DecodingMarker
from edge_fl_devices.data.file_index import FileIndex, SampleFacts, groups_of, origin
from edge_fl_devices.data.location import KINDS, file_digest, file_key, parsed
from edge_fl_devices.data.record import DataReport, Skipped
from edge_fl_devices.data.spec import DataSpec, ReadSamples, SourceData, Wants
from edge_fl_devices.data.split import hashed, position, require_two

RESERVOIR = b"reservoir"
LEFT_OUT = "of a class that this device leaves out"
IN_TWO = "also in the folder of another class"
BATCH = 32
NO_GROUPS = np.empty(0, "U1")


def of_classes(samples: Samples, classes: Sequence[str], spec: DataSpec) -> Indices:
    """Return the rows of the samples of the classes `spec.only`."""
    ids = [number for number, name in enumerate(classes) if name in spec.only]
    return np.flatnonzero(np.isin(samples.y, ids)) if spec.only else np.arange(len(samples))


def select(samples: Samples, classes: Sequence[str], spec: DataSpec, skipped: Counter[str]) -> Indices:
    """Return the rows of the samples of the classes `spec.only`, at most `spec.keep`; count the others.

    Raises DataError when none is left.
    """
    kept = of_classes(samples, classes, spec)
    if left_out := len(samples) - len(kept):
        skipped[LEFT_OUT] += left_out
    if spec.keep and len(kept) > spec.keep:
        skipped["beyond the images that this device keeps"] += len(kept) - spec.keep
        if spec.policy == "reservoir":
            places = [position(samples.x[row], RESERVOIR) for row in kept]
            kept = np.sort(kept[np.argsort(places, kind="stable")[: spec.keep]])
        else:
            kept = kept[-spec.keep :]
    if not len(kept):
        raise DataError(
            f"no image is left of {', '.join(spec.only)}; the source has {shortened(classes, 10)}"
        )
    return kept


def select_files(files: Iterable[Path], spec: DataSpec) -> list[Path]:
    """Return the pictures to read, at most `spec.keep`, in the given order; other files stay in the list, to be counted as skipped.

    The fair sample takes the `keep` smallest hashes of the names: a reservoir that needs no state between calls.
    """
    every = list(files)
    pictures = [path for path in every if path.suffix.lower() in ABOUT["picture"].suffixes]
    if not spec.keep or len(pictures) <= spec.keep:
        return every
    order: Callable[[Path], float] = _newest_first if spec.policy == "newest" else _name_position
    kept = set(sorted(pictures, key=order)[: spec.keep])
    return [path for path in every if path in kept or path.suffix.lower() not in ABOUT["picture"].suffixes]


def _newest_first(path: Path) -> float:
    try:
        return -path.stat().st_mtime_ns
    except OSError:  # deleted since it was listed
        return 0


def _name_position(path: Path) -> float:
    return hashed(raw(path.parent.name) + b"/" + raw(path.name), RESERVOIR)


def read(source: str, spec: DataSpec) -> SourceData:
    """Read a source, given as KIND:LOCATION with a kind of SOURCES, or as a folder or an .npz. Raises DataError, also between batches.

    Array are resized to `spec.input`.
    """
    kind, location = parsed(source)
    if spec.input:
        pictures._require_picture(spec.input, source)
    return SOURCES[kind](location, spec)


@dataclass(frozen=True)
class LabelledFolder:
    """Labelled picture files of a folder, and what was skipped; `hints` name folders that are probably a misspelt class."""

    root: Path
    classes: tuple[str, ...]
    files: list[tuple[Path, int]] = field(default_factory=list)
    skipped: Skipped = field(default_factory=Skipped)
    hints: tuple[str, ...] = ()
    depth: Depth = UNKNOWN_DEPTH

    def require(self, usable: int, spec: DataSpec) -> None:
        """Raise DataError for no usable picture or too many; NoLabelsError for fewer than two if no other file or folder is there."""
        if usable > spec.limits.max_samples:
            raise DataError(
                f"{text(self.root)}: more than {spec.limits.max_samples} samples; at most {spec.limits}"
            )
        if not usable:
            why = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items()) or "no files"
            where = shortened(self.classes, 10) or "a folder per class"
            hints = "".join(f"; {hint}" for hint in self.hints)
            message = f"{text(self.root)}: no usable image ({why}); expected pictures in {where}{hints}"
            raise DataError(message) if self.skipped or self.hints else NoLabelsError(message)
        if usable == 1 and not (self.skipped or self.hints):
            raise NoLabelsError(f"{text(self.root)}: 1 usable image, expected 2 or more")


def scan(location: str, spec: DataSpec) -> LabelledFolder:
    """List the pictures of a folder with their class ids; decodes none. Raises DataError for a missing folder."""
    root = Path(location)
    if not root.is_dir():
        raise DataError(f"{text(root)}: no such folder; expected one folder per class in it")
    listing = walk(root)
    names = {folder: class_of(folder) for folder in listing.folders}
    classes = spec.classes or tuple(sorted({name for name in names.values() if name}))
    hints = (*folder_remarks(listing, spec.classes), *_hints(names.values(), classes))
    found = LabelledFolder(root, classes, hints=hints)
    for path, reason in listing.skipped:
        found.skipped.add(path, reason, root=root)
    for path in select_files(_counted(listing.files, spec.files), spec):
        if reason := _skip_reason(path, root, classes, spec.only):
            found.skipped[reason] += 1
        else:
            found.files.append((path, classes.index(names[path.parent.name])))
    return found


def _counted(files: Iterable[Path], digests: frozenset[bytes] | None) -> Iterator[Path]:
    """The files that count (`DataSpec.files`); the others are not part of the data yet, or no longer."""
    for path in files:
        with suppress(OSError):
            if digests is None or file_digest(path, path.stat()) in digests:
                yield path


def count(location: str, spec: DataSpec, progress: Progress = ignore) -> DataReport:
    """Count the pictures of a folder by what is known of them, else by their headers; they may differ in size. Raises DataError.

    Their groups are counted once all are known.
    Of 16-bit pictures a sample is decoded.
    """

    def check(path: Path) -> tuple[SampleFacts, None]:
        try:
            pictures.check(path, spec.limits)
        except UnusableFileError as error:
            return SampleFacts(reason=error.reason, detail=error.detail), None
        return SampleFacts(), None

    found = scan(location, spec)
    with _marked(found, spec) as marker:
        found = replace(found, depth=depth_of([path for path, _ in found.files], spec, marker))
        usable = list(_usable(found, spec, marker, check, progress=progress))
    require_two(len(usable))
    labels, facts = np.array([each.label for each in usable], np.int64), [each.facts for each in usable]
    counts = np.bincount(labels, minlength=len(found.classes)).tolist()
    skipped = found.skipped
    report = DataReport(
        found.classes, tuple(counts), skipped, found.hints, names=skipped.names, depth=found.depth
    )
    return report.with_groups(labels, groups_of(facts)) if all(each.key for each in facts) else report


def folder(location: str, spec: DataSpec) -> SourceData:
    """Read `<location>/<class name>/*.png|jpg|...`; other files and folders outside the class list are skipped and counted.

    The pictures are decoded in a thread, one at a time; not those whose facts in `spec.index` are enough.
    """
    found = scan(location, spec)
    with _marked(found, spec) as marker:
        found = replace(found, depth=depth_of([path for path, _ in found.files], spec, marker))
    return SourceData(
        found.classes,
        lambda wants: ahead(_batches(_decoded(found, spec, wants))),
        skipped=found.skipped,
        hints=found.hints,
        total=len(found.files),
        depth=found.depth,
    )


@contextmanager
def _marked(found: LabelledFolder, spec: DataSpec) -> Iterator[DecodingMarker]:
    """Mark what is decoded, if there is an index to keep what that ends in; decode first, alone, what may have ended the last process."""
    with closing(DecodingMarker(spec.index.path.parent if spec.index else None)) as marker:
        marker.settle(
            (path for path, _ in found.files),
            lambda path: pictures.decode(path, spec.input, spec.limits, spec.bits),
        )
        yield marker


def depth_of(files: Sequence[Path], spec: DataSpec, marker: DecodingMarker) -> Depth:
    """Return the bits that 16-bit pictures use: those of the settings, or of a sample of the files."""

    def known(path: Path) -> pictures.Used | None:
        if marker.is_fatal(path):
            return 0, False
        with suppress(OSError):
            if spec.index and (facts := spec.index.find(path, path.stat())):
                return facts.used
        return None

    return Depth(spec.bits) if spec.bits else pictures.depth_of(files, spec.limits, known, marker.of)


class _Picture(NamedTuple):
    """A picture with its class id; its pixels [C, H, W], unless its facts are enough; and its facts, without an index only its origin."""

    path: Path
    label: int
    pixels: Array | None
    facts: SampleFacts


def _usable(
    found: LabelledFolder,
    spec: DataSpec,
    marker: DecodingMarker,
    read: Callable[[Path], tuple[SampleFacts, Array | None]],
    wants: Wants = lambda key: False,
    progress: Progress = ignore,
) -> Iterator[_Picture]:
    """Yield the usable pictures, with what is known of them, else what `read` finds; the others count as skipped, and so does a copy of a
    picture in the folder of another class, once its pixels are known.

    wants: whether to read a picture with this key although it is known. Raises DataError at the end as `LabelledFolder.require`.
    """
    usable, seen = 0, dict[bytes, tuple[Path, int]]()
    for number, (path, label) in enumerate(found.files):
        if number % BATCH == 0:
            progress(number, len(found.files))
        facts, pixels = _known(path, spec.index, found.depth, marker), None
        if facts is None or (not facts.reason and wants(facts.key)):
            with marker.of(path):
                facts, pixels = read(path)
        if facts.reason:
            found.skipped.add(path, facts.reason, facts.detail, root=found.root)
            continue
        first = seen.setdefault(facts.key, (path, label)) if facts.key else (path, label)
        if first[1] != label and _are_same(first[0], path):
            other = text(first[0].relative_to(found.root))
            found.skipped.add(path, IN_TWO, f"the same as {other}, which counts", root=found.root)
            continue
        usable += 1
        if usable > spec.limits.max_samples:
            break
        yield _Picture(path, label, pixels, structs.replace(facts, file=_file_key(path)))
    found.require(usable, spec)


def _are_same(one: Path, other: Path) -> bool:
    """Whether two files have the same content."""
    try:
        return filecmp.cmp(one, other, shallow=False)
    except OSError:  # deleted since it was listed
        return False


def _decoded(found: LabelledFolder, spec: DataSpec, wants: Wants) -> Iterator[_Picture]:
    first = None
    with _marked(found, spec) as marker:
        for each in _usable(found, spec, marker, lambda path: _read(path, spec, found.depth), wants):
            if each.pixels is not None:
                first = each.pixels.shape if first is None else first
                if each.pixels.shape != first:
                    raise DataError(
                        f"{text(each.path)}: {list(each.pixels.shape)}, but the first image is {list(first)}; expected one shape"
                    )
            yield each


def _file_key(path: Path) -> bytes:
    with suppress(OSError):
        return file_key(path.stat())
    return b""


def _known(path: Path, index: FileIndex | None, depth: Depth, marker: DecodingMarker) -> SampleFacts | None:
    """What is known of a file: that its decoding is fatal, or what the index knows from the same range of 16-bit pictures."""
    if marker.is_fatal(path):
        return SampleFacts(reason=FATAL)
    with suppress(OSError):
        facts = index.find(path, path.stat()) if index else None
        return facts if facts and facts.bits == depth.scale else None
    return None


def _read(path: Path, spec: DataSpec, depth: Depth) -> tuple[SampleFacts, Array | None]:
    """Decode a file, and let the index know what it is: with another content its facts are others, too."""
    index = spec.index
    try:
        stat = path.stat() if index else None
        pixels = pictures.decode(path, spec.input, spec.limits, depth.bits)
        header = pictures.header(path, spec.limits)
        comes_from = origin(path, header)
        used = pictures.bits_used(path, spec.limits) if header.wide and index else (0, False)
    except OSError:
        return SampleFacts(reason=UNREADABLE), None
    except UnusableFileError as error:
        facts = SampleFacts(reason=error.reason, detail=error.detail, bits=depth.scale)
        if index and stat and not error.passing:
            with suppress(UnusableFileError):  # a picture may use more bits than the others
                facts = structs.replace(facts, used=pictures.bits_used(path, spec.limits))
            index.add(path, stat, facts)
        return facts, None
    if index is None or stat is None:
        return SampleFacts(origin=comes_from), pixels
    facts = structs.replace(index.facts(pixels), origin=comes_from, bits=depth.scale, used=used)
    index.add(path, stat, facts)
    return facts, pixels


def _batches(read: Iterator[_Picture]) -> Iterator[ReadSamples]:
    while batch := list(islice(read, BATCH)):
        rows = [row for row, picture in enumerate(batch) if picture.pixels is not None]
        pixels = [picture.pixels for picture in batch if picture.pixels is not None]
        yield ReadSamples(
            np.array([picture.label for picture in batch], np.int64),
            np.stack(pixels) if pixels else np.empty((0, 0, 0, 0), np.uint8),
            np.array(rows, np.int64),
            [picture.facts for picture in batch],
        )


def archive(location: str, spec: DataSpec) -> SourceData:
    """Read an .npz with x and y, or x_train, y_train, x_test, y_test (and x_validation, y_validation), whose split is kept.

    groups [N], or groups_train and so on, optional: numbers or strings; images with the same one belong together.
    """
    if Path(location).exists() and (reason := unusable(Path(location))):
        raise DataError(f"{location}: {reason}; expected an .npz")
    content = npz.read(Path(location))
    train = "" if {"x", "y"} <= content.keys() else "_train"
    parts = [part for part in (train, "_validation", "_test") if {f"x{part}", f"y{part}"} <= content.keys()]
    if train not in parts:
        raise DataError(
            f"{location}: holds {', '.join(content) or 'nothing'}; expected x and y, or x_train and y_train"
        )
    classes = spec.classes or _names([content[f"y{part}"] for part in parts], location)
    samples = {
        part: Samples.of(content[f"x{part}"], content[f"y{part}"], classes, f"{location} (x{part})")
        for part in parts
    }
    if not all(len(samples[part]) for part in (train, "_test") if part in samples):
        raise DataError(f"{location}: no samples to train or to test on")
    if len({part.shape for part in samples.values()}) > 1:
        raise DataError(f"{location}: train, validation and test images differ in shape; expected one")
    given = {
        part: _groups(content.get(f"groups{part}"), len(samples[part]), f"{location} (groups{part})")
        for part in parts
    }
    return _of_arrays(location, classes, spec, samples.pop(train), samples, {"": given.pop(train), **given})


def function(location: str, spec: DataSpec) -> SourceData:
    """Call `package.module:function` of the Python path without arguments.

    It returns (x, y) or (x, y, groups) in any form that an .npz may have.
    """
    module, _, name = location.partition(":")
    where = f"python:{location}"
    try:
        x, y, *groups = getattr(importlib.import_module(module), name)()
    except Exception as error:  # third-party code may raise anything
        raise DataError(
            f"{where}: {type(error).__name__}: {error}; expected package.module:function that returns (x, y) or (x, y, groups)"
        ) from error
    x, y = np.asarray(x), np.asarray(y)
    classes = spec.classes or _names([y], where)
    samples = Samples.of(x, y, classes, where)
    given = np.asarray(groups[0]) if groups else None
    return _of_arrays(
        where, classes, spec, samples, {}, {"": _groups(given, len(samples), f"{where} (groups)")}
    )


def _of_arrays(
    where: str,
    classes: tuple[str, ...],
    spec: DataSpec,
    train: Samples,
    others: dict[str, Samples],
    groups: dict[str, Array],
) -> SourceData:
    """Select from arrays; with a "_test" set among the `others` their split is kept. groups: of each set, that of `train` under ""."""
    skipped = Skipped()
    rows = select(train, classes, spec, skipped)
    train, given = train.take(rows), [groups[""][rows]]
    if "_test" not in others:
        batches, side = resized([train], spec.input, where), min(train.shape[1:])
        return SourceData(classes, lambda wants: batches, skipped=skipped, groups=_numbered(given), side=side)
    sets = [train]
    for part in ("_validation", "_test"):
        samples = others.get(part, train.take(np.empty(0, np.int64)))
        rows = of_classes(samples, classes, spec)
        sets.append(samples.take(rows))
        given.append(groups.get(part, NO_GROUPS)[rows])
    sizes = (len(train), len(sets[1]), len(sets[2]))
    batches, side = resized(sets, spec.input, where), min(train.shape[1:])
    return SourceData(classes, lambda wants: batches, sizes, skipped, groups=_numbered(given), side=side)


def _groups(given: Array | None, count: int, where: str) -> Array:
    """Check the groups of `count` images, numbers or strings; return them as strings, "" without any."""
    if given is None:
        return np.full(count, "")
    if given.shape != (count,) or given.dtype.kind not in "iuUS":
        raise DataError(
            f"{where}: {given.dtype} {list(given.shape)}, expected {count} whole numbers or strings, one per image"
        )
    return given.astype(str)


def _numbered(given: list[Array]) -> Groups:
    """Return groups of all sets as numbers, -1 for ""."""
    names, numbers = np.unique(np.concatenate(given), return_inverse=True)
    found: Groups = np.where(names[numbers] == "", -1, numbers).astype(np.int64)
    return found


def resized(sets: Iterable[Samples], input: InputSpec | None, where: str) -> Iterator[Samples]:
    """Yield the samples of all sets in batches, in the size that the extractor takes."""
    for samples in sets:
        for start in range(0, len(samples), BATCH):
            x, y = samples.x[start : start + BATCH], samples.y[start : start + BATCH]
            yield Samples(pictures.fit(x, input, where) if input else x, y)


SOURCES: dict[str, Callable[[str, DataSpec], SourceData]] = dict(
    zip(KINDS, (folder, archive, function), strict=True)
)


def _hints(folders: Iterable[str], classes: tuple[str, ...]) -> Iterator[str]:
    """Name the class that is nearest to the name of each folder outside the class list, ignoring case."""
    for name in sorted(set(folders)):
        if name and name not in classes and (near := nearest_class(name, classes)):
            yield f"folder {name!r} is not a class: did you mean {near!r}?"


def _skip_reason(path: Path, root: Path, classes: tuple[str, ...], only: tuple[str, ...]) -> str:
    if path.parent.parent != root:
        return "not directly in a class folder"
    name = class_of(path.parent.name)
    if name not in classes:
        return outside(path.parent.name, classes)
    if only and name not in only:
        return LEFT_OUT
    return "" if path.suffix.lower() in ABOUT["picture"].suffixes else "not a picture file"


def _names(labels: list[Array], where: str) -> tuple[str, ...]:
    """Return the class ids up to the highest as names."""
    highest = (int(ids.max()) for ids in (class_ids(y, where) for y in labels) if len(ids))
    return tuple(map(str, range(1 + max(highest, default=0))))
