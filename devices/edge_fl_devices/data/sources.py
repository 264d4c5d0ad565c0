"""Data sources of a device: a folder per class, an .npz or .csv file, or a Python function; of them the samples that its settings select.

To add a source: one function (location, spec -> SourceData) in SOURCES, and its kind in `location.KINDS`.
"""

from __future__ import annotations

import filecmp
import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs

from edge_fl import modalities
from edge_fl.data import grouping
from edge_fl.data.class_names import class_of, folder_remarks, nearest_class, outside
from edge_fl.data.datasets import given_input
from edge_fl.data.samples import (
    NO_GROUPS,
    Array,
    Groups,
    Indices,
    Labels,
    Samples,
    as_groups,
    class_ids,
    numbered,
)
from edge_fl.errors import DataError, NoLabelsError, shortened
from edge_fl.files import npz
from edge_fl.files.folder import UNREADABLE, unusable, walk
from edge_fl.files.paths import raw, text
from edge_fl.inputs import InputSpec, Kind
from edge_fl.modalities import ABOUT, About, UnusableFileError, kind_of_most
from edge_fl.modalities.limits import UNKNOWN_DEPTH, Depth
from edge_fl.threads import ahead
from edge_fl_devices.child import Progress, ignore
from edge_fl_devices.data.decoding_marker import FATAL, DecodingMarker
from edge_fl_devices.data.file_index import FileFacts, SampleFacts, groups_of, origin
from edge_fl_devices.data.location import KINDS, file_digest, file_key, parsed
from edge_fl_devices.data.record import DataReport, Skipped
from edge_fl_devices.data.spec import DataSpec, ReadSamples, SourceData, Wants
from edge_fl_devices.data.split import hashed, position, require_two

RESERVOIR = b"reservoir"
LEFT_OUT = "of a class that this device leaves out"
IN_TWO = "also in the folder of another class"
BATCH = 32


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
        skipped["beyond the samples that this device keeps"] += len(kept) - spec.keep
        if spec.policy == "reservoir":
            places = [position(samples.x[row], RESERVOIR) for row in kept]
            kept = np.sort(kept[np.argsort(places, kind="stable")[: spec.keep]])
        else:
            kept = kept[-spec.keep :]
    if not len(kept):
        raise DataError(
            f"no sample is left of {', '.join(spec.only)}; the source has {shortened(classes, 10)}"
        )
    return kept


def select_files(files: Iterable[Path], spec: DataSpec, kind: Kind = "picture") -> list[Path]:
    """Return the files to read, at most `spec.keep` of this kind, in the given order; others stay in the list, to be counted as skipped.

    The fair sample takes the `keep` smallest hashes of the names: a reservoir that needs no state between calls.
    """
    every, suffixes = list(files), ABOUT[kind].suffixes
    usable = [path for path in every if path.suffix.lower() in suffixes]
    if not spec.keep or len(usable) <= spec.keep:
        return every
    order: Callable[[Path], float] = _newest_first if spec.policy == "newest" else _name_position
    kept = set(sorted(usable, key=order)[: spec.keep])
    return [path for path in every if path in kept or path.suffix.lower() not in suffixes]


def _newest_first(path: Path) -> float:
    try:
        return -path.stat().st_mtime_ns
    except OSError:  # deleted since it was listed
        return 0


def _name_position(path: Path) -> float:
    return hashed(raw(path.parent.name) + b"/" + raw(path.name), RESERVOIR)


def read(source: str, spec: DataSpec) -> SourceData:
    """Read a source, given as KIND:LOCATION with a kind of SOURCES, or as a folder, an .npz or a .csv. Raises DataError, also later.

    Samples get the shape of `spec.input`.
    """
    kind, location = parsed(source)
    return SOURCES[kind](location, spec)


@dataclass(frozen=True)
class LabelledFolder:
    """Labelled files of one kind in a folder, and what was skipped; `hints` name folders that are probably a misspelt class.

    other: the kind of most files that are of another kind, None if there are none. is_known: whether release or files tell the kind;
    without either it is that of pictures.
    """

    root: Path
    classes: tuple[str, ...]
    kind: Kind = "picture"
    files: list[tuple[Path, int]] = field(default_factory=list)
    skipped: Skipped = field(default_factory=Skipped)
    remarks: Skipped = field(default_factory=Skipped)
    hints: tuple[str, ...] = ()
    other: Kind | None = None
    is_known: bool = True
    depth: Depth = UNKNOWN_DEPTH

    @property
    def about(self) -> About:
        """The words for these samples."""
        return ABOUT[self.kind]

    def require(self, usable: int, spec: DataSpec) -> None:
        """Raise DataError for no usable sample or too many; NoLabelsError for fewer than two if no other file or folder is there."""
        about, most = self.about, spec.limits.max_samples
        if usable > most:
            raise DataError(f"{text(self.root)}: more than {most} {about.samples}; expected at most so many")
        if not usable:
            why = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items()) or "no files"
            where = shortened(self.classes, 10) or "a folder per class"
            hints = "".join(f"; {hint}" for hint in self.hints)
            if self.other and spec.input:
                hints += f"; the files are {ABOUT[self.other].files} ({self.other}), but {_taken(spec.input)}"
            what, files = (about.sample, about.files) if self.is_known else ("file", "files")
            message = f"{text(self.root)}: no usable {what} ({why}); expected {files} in {where}{hints}"
            raise DataError(message) if self.skipped or self.hints else NoLabelsError(message)
        if usable == 1 and not (self.skipped or self.hints):
            raise NoLabelsError(f"{text(self.root)}: 1 usable {about.sample}, expected 2 or more")


def _taken(input: InputSpec) -> str:
    return f"the release takes {ABOUT[input.kind].samples} ({input.kind})"


def scan(location: str, spec: DataSpec) -> LabelledFolder:
    """List the files of samples in a folder with their class ids; opens none. Raises DataError for a missing folder.

    They are of the kind that the extractor takes, before the first release of that of most files.
    """
    root = Path(location)
    if not root.is_dir():
        raise DataError(f"{text(root)}: no such folder; expected one folder per class in it")
    listing = walk(root)
    names = {folder: class_of(folder) for folder in listing.folders}
    classes = spec.classes or tuple(sorted({name for name in names.values() if name}))
    hints = (*folder_remarks(listing, spec.classes), *_hints(names.values(), classes))
    counted = list(_counted(listing.files, spec.files))
    found_kind = spec.input.kind if spec.input else kind_of_most(counted)
    kind = found_kind or "picture"
    others = [path for path in counted if path.suffix.lower() not in ABOUT[kind].suffixes]
    found = LabelledFolder(
        root, classes, kind, hints=hints, other=kind_of_most(others), is_known=bool(found_kind)
    )
    for path, reason in listing.skipped:
        found.skipped.add(path, reason, root=root)
    for path in select_files(counted, spec, kind):
        if reason := _skip_reason(path, found, spec.only):
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
    """Count the samples of a folder by what is known of its files, else one per file, by its header. Raises DataError.

    Their groups are counted once all are known. Of 16-bit pictures a sample is decoded.
    """

    def check(path: Path, stat: os.stat_result) -> tuple[FileFacts, None]:
        try:
            modalities.of(found.kind).check(path, spec.limits)
        except UnusableFileError as error:
            return FileFacts(reason=error.reason, detail=error.detail), None
        return FileFacts(), None

    found = scan(location, spec)
    with _marked(found, spec) as marker:
        found = _with_depth(found, spec, marker)
        usable = list(_usable(found, spec, marker, check, progress=progress))
    if found.kind == "picture":  # a recording may have many samples
        require_two(len(usable), found.about.sample)
    labels = np.array([each.label for each in usable for _ in each.samples or [None]], np.int64)
    facts = [sample for each in usable for sample in each.samples]
    known = all(each.samples for each in usable)
    return report(found, labels, groups_of(facts, kind=found.kind) if known else None)


def report(found: LabelledFolder | SourceData, y: Labels, groups: Groups | None) -> DataReport:
    """Summarise samples that were found, with class ids y [n] in these groups [n] (None: not known yet)."""
    known = NO_GROUPS if groups is None else groups
    return DataReport(
        found.classes,
        tuple(np.bincount(y, minlength=len(found.classes)).tolist()),
        found.skipped,
        found.hints,
        names=found.skipped.names | found.remarks.names,
        scenes=0 if groups is None else grouping.count(groups, len(y)),
        single=tuple(found.classes[label] for label in grouping.single(y, known)),
        depth=found.depth,
        kind=found.kind,
        remarks=found.remarks,
    )


def folder(location: str, spec: DataSpec) -> SourceData:
    """Read `<location>/<class name>/*.png|jpg|csv|...`; other files and folders outside the class list are skipped and counted.

    The files are read in a thread, one at a time; not those whose facts in `spec.index` are enough.
    """
    found = scan(location, spec)
    with _marked(found, spec) as marker:
        found = _with_depth(found, spec, marker)
    return SourceData(
        found.classes,
        lambda wants: ahead(_batches(_read_all(found, spec, wants))),
        skipped=found.skipped,
        hints=found.hints,
        total=len(found.files),
        depth=found.depth,
        kind=found.kind,
        remarks=found.remarks,
    )


@contextmanager
def _marked(found: LabelledFolder, spec: DataSpec) -> Iterator[DecodingMarker]:
    """Mark what is decoded, if there is an index to keep what that ends in; decode first, alone, what may have ended the last process."""
    with closing(DecodingMarker(spec.index.path.parent if spec.index else None)) as marker:
        marker.settle(
            (path for path, _ in found.files),
            lambda path: modalities.of(found.kind).read(path, spec.input, spec.limits, spec.bits),
        )
        yield marker


def _with_depth(found: LabelledFolder, spec: DataSpec, marker: DecodingMarker) -> LabelledFolder:
    files = [path for path, _ in found.files]
    return replace(found, depth=depth_of(files, spec, marker)) if found.kind == "picture" else found


def depth_of(files: Sequence[Path], spec: DataSpec, marker: DecodingMarker) -> Depth:
    """Return the bits that 16-bit pictures use: those of the settings, or of a sample of the files."""

    def known(path: Path) -> tuple[int, bool] | None:
        if marker.is_fatal(path):
            return 0, False
        with suppress(OSError):
            if spec.index and (facts := spec.index.find(path, path.stat())):
                return facts.used
        return None

    from edge_fl.modalities import pictures  # here: other devices need no Pillow

    return Depth(spec.bits) if spec.bits else pictures.depth_of(files, spec.limits, known, marker.of)


class _File(NamedTuple):
    """A file with its class id; the values of its samples [n, ...], unless their facts are enough; and these facts, if they are known.

    Without an index they have only an origin and the file's key.
    """

    path: Path
    label: int
    x: Array | None
    samples: tuple[SampleFacts, ...]


Read = Callable[[Path, os.stat_result], tuple[FileFacts, Array | None]]


def _usable(
    found: LabelledFolder,
    spec: DataSpec,
    marker: DecodingMarker,
    read: Read,
    wants: Wants = lambda key: False,
    progress: Progress = ignore,
) -> Iterator[_File]:
    """Yield the usable files, with what is known of them, else what `read` finds; the others count as skipped, and so does a copy of a
    file in the folder of another class, once its samples are known.

    wants: whether to read a sample with this key although it is known. Raises DataError at the end as `LabelledFolder.require`.
    """
    usable, seen = 0, dict[bytes, tuple[Path, int]]()
    for number, (path, label) in enumerate(found.files):
        if number % BATCH == 0:
            progress(number, len(found.files))
        try:
            stat = path.stat()
        except OSError:  # deleted since it was listed
            found.skipped.add(path, UNREADABLE, root=found.root)
            continue
        facts, x = _known(path, stat, found, spec, marker), None
        if facts is None or any(wants(each.key) for each in facts.samples):
            with marker.of(path):
                facts, x = read(path, stat)
        if facts.reason:
            found.skipped.add(path, facts.reason, facts.detail, root=found.root)
            continue
        first = seen.setdefault(facts.content, (path, label)) if facts.content else (path, label)
        if first[1] != label and _are_same(first[0], path):
            other = text(first[0].relative_to(found.root))
            found.skipped.add(path, IN_TWO, f"the same as {other}, which counts", root=found.root)
            continue
        for remark in facts.remarks:
            found.remarks.add(path, remark, root=found.root)
        usable += max(1, len(facts.samples))
        if usable > spec.limits.max_samples:
            break
        yield _File(path, label, x, facts.of(file_key(stat)))
    found.require(usable, spec)


def _are_same(one: Path, other: Path) -> bool:
    """Whether two files have the same content."""
    with suppress(OSError):  # deleted since it was listed
        return filecmp.cmp(one, other, shallow=False)
    return False


def _known(
    path: Path, stat: os.stat_result, found: LabelledFolder, spec: DataSpec, marker: DecodingMarker
) -> FileFacts | None:
    """What is known of a file: that its decoding is fatal, or what the index knows from the same range of 16-bit pictures."""
    if marker.is_fatal(path):
        return FileFacts(reason=FATAL)
    facts = spec.index.find(path, stat) if spec.index else None
    return facts if facts and facts.bits == found.depth.scale else None


_Sample = tuple[int, Array | None, SampleFacts]
"""The class id of a sample; its values, unless its facts are enough."""


def _read_all(found: LabelledFolder, spec: DataSpec, wants: Wants) -> Iterator[_Sample]:
    first = None
    with _marked(found, spec) as marker:
        for each in _usable(found, spec, marker, lambda path, stat: _read(path, stat, found, spec), wants):
            if each.x is not None:
                first = each.x.shape[1:] if first is None else first
                if each.x.shape[1:] != first:
                    raise DataError(
                        f"{text(each.path)}: {list(each.x.shape[1:])}, but the first {found.about.sample} is {list(first)};"
                        " expected one shape"
                    )
            for row, facts in enumerate(each.samples):
                yield each.label, None if each.x is None else each.x[row], facts


def _read(
    path: Path, stat: os.stat_result, found: LabelledFolder, spec: DataSpec
) -> tuple[FileFacts, Array | None]:
    """Read a file, and let the index know what it is: with another content its facts are others, too."""
    index, depth = spec.index, found.depth
    try:
        x, remarks = modalities.of(found.kind).read(path, spec.input, spec.limits, depth.bits)
        if not len(x):
            raise UnusableFileError(path, f"no {found.about.sample} in it")
        facts = FileFacts(tuple(map(index.facts, x)) if index else (SampleFacts(),) * len(x), remarks=remarks)
        facts = _of_picture(facts, path, found, spec)
    except OSError:
        return FileFacts(reason=UNREADABLE), None
    except UnusableFileError as error:
        facts = FileFacts(reason=error.reason, detail=error.detail, bits=depth.scale)
        if index and not error.passing:
            with suppress(UnusableFileError):  # a picture may use more bits than the others
                facts = _of_picture(facts, path, found, spec)
            index.add(path, stat, facts)
        return facts, None
    if index:
        index.add(path, stat, facts)
    return facts, x


def _of_picture(facts: FileFacts, path: Path, found: LabelledFolder, spec: DataSpec) -> FileFacts:
    """Add to the facts of a picture its origin, and the bits that it uses. Raises UnusableFileError."""
    if found.kind != "picture":
        return facts
    from edge_fl.modalities import pictures  # as above

    header = pictures.header(path, spec.limits)
    used = pictures.bits_used(path, spec.limits) if header.wide and spec.index else (0, False)
    return structs.replace(facts, origin=origin(path, header), bits=found.depth.scale, used=used)


def _batches(read: Iterator[_Sample]) -> Iterator[ReadSamples]:
    while batch := list(islice(read, BATCH)):
        labels, values, facts = zip(*batch, strict=True)
        rows = [row for row, x in enumerate(values) if x is not None]
        x = np.stack([values[row] for row in rows]) if rows else np.empty(0)
        yield ReadSamples(np.array(labels, np.int64), x, np.array(rows, np.int64), facts)


def archive(location: str, spec: DataSpec) -> SourceData:
    """Read an .npz with x and y, or x_train, y_train, x_test, y_test (and x_validation, y_validation), whose split is kept.

    groups [N], or groups_train and so on, optional: numbers or strings; samples with the same one belong together. input, optional: an
    `InputSpec` as JSON.
    """
    path = Path(location)
    if path.exists() and (reason := unusable(path)):
        raise DataError(f"{location}: {reason}; expected an .npz")
    content = npz.read(path)
    train = "" if {"x", "y"} <= content.keys() else "_train"
    parts = [part for part in (train, "_validation", "_test") if {f"x{part}", f"y{part}"} <= content.keys()]
    if train not in parts:
        raise DataError(
            f"{location}: holds {', '.join(content) or 'nothing'}; expected x and y, or x_train and y_train"
        )
    classes = spec.classes or numbered(class_ids(content[f"y{part}"], location) for part in parts)
    kind = _kind(content[f"x{train}"], spec.input, given_input(content, path), location)
    samples = {
        part: Samples.of(content[f"x{part}"], content[f"y{part}"], classes, f"{location} (x{part})", kind)
        for part in parts
    }
    if not all(len(samples[part]) for part in (train, "_test") if part in samples):
        raise DataError(f"{location}: no samples to train or to test on")
    if len({part.shape for part in samples.values()}) > 1:
        raise DataError(
            f"{location}: train, validation and test {ABOUT[kind].samples} differ in shape; expected one"
        )
    names = [
        _groups(content.get(f"groups{part}"), len(samples[part]), f"{location} (groups{part})")
        for part in parts
    ]
    numbers = as_groups(np.concatenate(names), sum(map(len, names)), location)
    own = np.split(numbers, np.cumsum([len(each) for each in names])[:-1])
    for part, groups in zip(parts, own, strict=True):
        samples[part] = replace(samples[part], groups=groups)
    return _of_arrays(location, classes, spec, kind, samples.pop(train), samples)


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
    classes, kind = spec.classes or numbered([class_ids(y, where)]), _kind(x, spec.input, None, where)
    given = _groups(np.asarray(groups[0]) if groups else None, len(y), f"{where} (groups)")
    return _of_arrays(where, classes, spec, kind, Samples.of(x, y, classes, where, kind, given), {})


def table(location: str, spec: DataSpec) -> SourceData:
    """Read a CSV file with a sample in each row, a column of classes, and perhaps one of groups (`edge_fl.modalities.tables`)."""
    from edge_fl.modalities import tables  # here: for other data it is not needed

    if spec.input:
        modalities.require_kind(spec.input, "table", location)
    path = Path(location)
    found = tables.rows(path, spec.input, spec.classes, limits=spec.limits)
    if not len(found.x):
        raise DataError(f"{location}: no usable row ({'; '.join(found.remarks)})")
    groups = np.array(found.groups, str) if found.groups else None
    samples = Samples.of(found.x, found.y, found.classes, location, "table", groups)
    content = _of_arrays(location, found.classes, spec, "table", samples, {})
    for remark in found.remarks:
        content.remarks.add(path, remark, root=path.parent)
    return content


def _kind(x: Array, taken: InputSpec | None, given: InputSpec | None, where: str) -> Kind:
    """What samples of an array are: as its file says, else as the extractor takes them; without either floats [N, F] are a table, and
    [N, C, T] a series. Raises DataError if the extractor takes others.
    """
    if given and taken and (given.kind, given.rate) != (taken.kind, taken.rate):
        at = " at {:g} Hz".format
        raise DataError(
            f"{where}: {ABOUT[given.kind].samples} ({given.kind}){at(given.rate) if given.rate else ''},"
            f" but {_taken(taken)}{at(taken.rate) if taken.rate else ''}"
        )
    if known := given or taken:
        return known.kind
    kinds: dict[int, Kind] = {2: "table", 3: "series"}
    return kinds.get(x.ndim, "picture") if x.dtype.kind == "f" else "picture"


def _of_arrays(
    where: str,
    classes: tuple[str, ...],
    spec: DataSpec,
    kind: Kind,
    train: Samples,
    others: dict[str, Samples],
) -> SourceData:
    """Select from arrays; with a "_test" set among the `others` their split is kept."""
    skipped = Skipped()
    train = train.take(select(train, classes, spec, skipped))
    sets, none = [train], train.take(np.empty(0, np.int64))
    for each in (others.get("_validation", none), others["_test"]) if "_test" in others else ():
        sets.append(each.take(of_classes(each, classes, spec)))
    return of_sets(sets, classes, spec.input, where, kind, skipped)


def of_sets(
    sets: Sequence[Samples],
    classes: tuple[str, ...],
    input: InputSpec | None,
    where: str,
    kind: Kind,
    skipped: Skipped,
) -> SourceData:
    """The content of arrays of a kind, in the shape of `input`: of one set, or of train, validation and test."""
    groups = [each.groups if len(each.groups) else np.full(len(each), -1) for each in sets]
    batches, side = _fitted(sets, input, where), min(sets[0].shape[1:]) if kind == "picture" else 0
    together = np.concatenate(groups)
    sizes = [len(each) for each in sets] if len(sets) > 1 else None
    return SourceData(classes, lambda wants: batches, sizes, skipped, groups=together, side=side, kind=kind)


def _groups(given: Array | None, count: int, where: str) -> Array:
    """Check the groups of `count` samples, numbers or strings; return them as strings, "" without any."""
    if given is None:
        return np.full(count, "")
    if given.shape != (count,) or given.dtype.kind not in "iuUS":
        raise DataError(
            f"{where}: {given.dtype} {list(given.shape)}, expected {count} whole numbers or strings, one per sample"
        )
    return given.astype(str)


def _fitted(sets: Iterable[Samples], input: InputSpec | None, where: str) -> Iterator[Samples]:
    """Yield the samples of all sets in batches, in the shape that the extractor takes."""
    for samples in sets:
        for start in range(0, len(samples), BATCH):
            x, y = samples.x[start : start + BATCH], samples.y[start : start + BATCH]
            yield Samples(modalities.of(input.kind).fit(x, input, where) if input else x, y)


SOURCES: dict[str, Callable[[str, DataSpec], SourceData]] = dict(
    zip(KINDS, (folder, archive, function, table), strict=True)
)


def _hints(folders: Iterable[str], classes: tuple[str, ...]) -> Iterator[str]:
    """Name the class that is nearest to the name of each folder outside the class list, ignoring case."""
    for name in sorted(set(folders)):
        if name and name not in classes and (near := nearest_class(name, classes)):
            yield f"folder {name!r} is not a class: did you mean {near!r}?"


def _skip_reason(path: Path, found: LabelledFolder, only: tuple[str, ...]) -> str:
    if path.parent.parent != found.root:
        return "not directly in a class folder"
    name = class_of(path.parent.name)
    if name not in found.classes:
        return outside(path.parent.name, found.classes)
    if only and name not in only:
        return LEFT_OUT
    suffixes, a = found.about.suffixes, "an" if found.kind == "audio" else "a"
    return "" if path.suffix.lower() in suffixes else f"not {a} {found.kind} file"
