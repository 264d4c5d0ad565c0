"""Read a device's data according to its settings: for full devices into memory, for head-only devices in batches that are forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from msgspec import structs

from edge_fl import __version__, modalities
from edge_fl.data.grouping import Groups
from edge_fl.data.samples import Array, ClientData, Labels, Samples
from edge_fl.errors import ArtefactError, DataError, NoLabelsError
from edge_fl.failures import Failure
from edge_fl.inputs import InputSpec, Kind
from edge_fl.modalities.limits import LIMITS
from edge_fl_devices.board.capabilities import version
from edge_fl_devices.child import Progress, ignore
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import location, record, sources
from edge_fl_devices.data.file_index import FileIndex, SampleFacts, groups_of
from edge_fl_devices.data.record import DataReport, Skipped
from edge_fl_devices.data.sources import of_sets, report
from edge_fl_devices.data.spec import DataSpec, ReadSamples, SourceData, Wants
from edge_fl_devices.data.split import SPLIT, DeviceSplit, Sets, key, position

FEATURES = "features"
"""The folder of what is known of samples, in the device's own."""

LoadData = Callable[[tuple[str, ...], InputSpec], ClientData]
"""Returns the device's data for these classes and this input, as they are now."""


class SampleStream:
    """Iterate over it once, completely, or over what it `read`s; afterwards `labels`, `sets` and `report` are known.

    labels: class ids int64 [n] in the order of reading. facts [n]: what is known of each sample. files [n]: keys of their
    files, b"" for samples of arrays. groups: which samples belong together [n], empty if all are alone. sets: the rows of the three sets in
    that order. `where` begins the messages of errors, `remember` completes the report.
    """

    labels: Labels
    facts: list[SampleFacts]
    files: list[bytes]
    groups: Groups
    sets: Sets
    report: DataReport

    def __init__(
        self,
        content: SourceData,
        split: DeviceSplit = SPLIT,
        where: str = "",
        remember: Callable[[DataReport], DataReport] = lambda report: report,
        index: FileIndex | None = None,
    ) -> None:
        self.index, self.total = index, content.total
        self._content, self._split, self._where, self._remember = content, split, where, remember

    @classmethod
    def of(cls, data: ClientData, classes: Sequence[str], input: InputSpec) -> SampleStream:
        """Stream the three sets of data in memory, resized to `input`."""
        sets = (data.train, data.validation, data.test)
        return cls(of_sets(sets, tuple(classes), input, "this device's data", input.kind, Skipped()))

    @property
    def bits(self) -> int:
        """Bits that the 16-bit pictures use; 0 if there are none."""
        return self._content.depth.bits

    def __iter__(self) -> Iterator[Samples]:
        """Read the samples in batches. Raises DataError, also without training samples or for a label without a class."""
        for batch in self.read():
            yield Samples(batch.x, batch.y)

    def read(self, wants: Wants = lambda key: True) -> Iterator[ReadSamples]:
        """As iterating, with the facts of each sample; the values of known ones that `wants` does not want are left out."""
        content = self._content
        labels: list[Labels] = [np.empty(0, np.int64)]
        facts: list[SampleFacts] = []
        for batch in content.batches(wants):
            if isinstance(batch, Samples):
                batch = ReadSamples(batch.y, batch.x, np.arange(len(batch)), [SampleFacts()] * len(batch))
            if any(not each.key for each in batch.facts):
                known = zip(batch.facts, batch.x, strict=True)
                found = [
                    structs.replace(
                        facts_of(sample, self._split.key, content.kind), origin=each.origin, file=each.file
                    )
                    for each, sample in known
                ]
                batch = replace(batch, facts=found)
            facts += batch.facts
            labels.append(batch.y)
            yield batch
        self.labels = np.concatenate(labels)
        self.facts, self.files = facts, [each.file for each in facts]
        self.groups = groups_of(facts, content.side, content.groups, content.kind)
        if content.sizes is None:  # the first sample of a recording decides on its set
            times = [
                each.origin.seconds if each.origin else row for row, each in enumerate(facts) if each.file
            ]
            self.sets = self._split.sets([each.position for each in facts], self.groups, times)
        else:
            train, validation, test = np.split(np.arange(sum(content.sizes)), np.cumsum(content.sizes)[:2])
            self.sets = train, validation, test
        if not len(self.labels):
            kind = DataError if content.skipped else NoLabelsError
            raise kind(f"{self._where}no labelled samples on this device")
        classes = len(content.classes)
        if self.labels.max() >= classes:
            raise DataError(f"{self._where}labels up to {self.labels.max()}, expected {classes} classes")
        self.report = self._remember(report(content, self.labels, self.groups))


def facts_of(sample: Array, split_key: bytes, kind: Kind) -> SampleFacts:
    """Return what the split and the fit need of a sample; near duplicates are looked for among pictures only."""
    thumbnail = b""
    if kind == "picture":
        from edge_fl.modalities import pictures  # here: other devices need no Pillow

        thumbnail = pictures.thumbnails(sample[None]).tobytes()
    return SampleFacts(key(sample), position(sample, split_key), thumbnail)


def collect(stream: SampleStream, most_bytes: int = LIMITS.max_bytes) -> ClientData:
    """Read all samples into memory. Raises DataError."""
    found, held = [], 0
    for batch in stream:
        found.append(batch.x)
        held += batch.x.nbytes
        if held > most_bytes:
            raise DataError(f"samples of more than {most_bytes >> 20} MB in memory, expected less; set keep")
    every = Samples(np.concatenate(found), stream.labels, stream.groups)
    return ClientData(*(every.take(rows) for rows in stream.sets))


def usable(data: ClientData, classes: Sequence[str], input: InputSpec, where: str, taker: str) -> ClientData:
    """Return the data in the shape of `input`. Raises DataError without training samples, or for labels or samples that do not fit.

    `where` begins the message, `taker` names what uses the data.
    """
    if not len(data.train):
        nothing = not len(data.validation) and not len(data.test)
        raise (NoLabelsError if nothing else DataError)(f"{where}no training samples on this device")
    for samples in (data.train, data.validation, data.test):
        if len(samples) and samples.y.max() >= len(classes):
            raise DataError(f"{where}labels up to {samples.y.max()}, {taker} takes {len(classes)} classes")
    fit = modalities.of(input.kind).fit
    sets = (data.train, data.validation, data.test)
    return ClientData(*(replace(samples, x=fit(samples.x, input, f"{where}{taker}")) for samples in sets))


def streamer(
    config: DeviceConfig, files: frozenset[bytes] | None = None
) -> Callable[[tuple[str, ...], InputSpec], SampleStream]:
    """Return a function that reads the data that these settings name in batches; `files` as of `DataSpec`."""
    return lambda classes, input: _stream(config, DataSpec(classes, input, files=files))


def load_for(config: DeviceConfig, spec: DataSpec) -> tuple[ClientData, DataReport]:
    """Read the data that these settings name into memory.

    Raises DataError: no source, fewer than two samples, others than the extractor takes, labels outside the class list.
    """
    with recording(config):
        stream = _stream(config, spec)
        data = collect(stream)
        if stream.index:
            with suppress(ArtefactError):  # a full disk: the next reading decodes again
                stream.index.flush()
        return data, stream.report


def count_for(config: DeviceConfig, spec: DataSpec, progress: Progress = ignore) -> DataReport:
    """Summarise the data that these settings name; of the files of a folder only headers are read.

    progress: takes how many files are counted. Raises DataError as `load_for`.
    """
    with recording(config):
        kind, folder = location.parsed(config.data)
        if kind != "folder":
            stream = _stream(config, spec)
            for _ in stream:
                pass
            return stream.report
        spec = with_settings(replace(spec, index=_index(config, spec)), config)
        return record.remember(
            Path(config.folder), sources.count(folder, spec, progress), spec.classes, spec.only
        )


@contextmanager
def recording(config: DeviceConfig) -> Iterator[None]:
    """Store the message of a DataError for `device status`."""
    try:
        yield
    except DataError as error:
        why = Failure.NO_LABELS if isinstance(error, NoLabelsError) else Failure.NO_DATA
        record.remember_problem(Path(config.folder), why, error.message)
        raise


def _stream(config: DeviceConfig, spec: DataSpec) -> SampleStream:
    """Stream the data that these settings name; its report is stored for `device status`."""
    spec = with_settings(replace(spec, index=_index(config, spec)), config)
    remember = partial(record.remember, Path(config.folder), classes=spec.classes, only=spec.only)
    content = sources.read(config.data, spec)
    return SampleStream(content, _split(config), f"{config.data}: ", remember, spec.index)


def _split(config: DeviceConfig) -> DeviceSplit:
    return DeviceSplit(config.test_fraction, config.validation_fraction, config.seed, config.id)


def _index(config: DeviceConfig, spec: DataSpec) -> FileIndex | None:
    """What is known of the files for this input; None for other data, and before the first release."""
    if not config.reads_folder or spec.input is None:
        return None
    decoders = (__version__, version("pillow"), version("pillow-heif"))  # other ones may give other values
    key, kind = _split(config).key, spec.input.kind
    reading = (decoders, spec.input, spec.limits, key)
    return FileIndex(Path(config.folder) / FEATURES, reading, partial(facts_of, split_key=key, kind=kind))


def with_settings(spec: DataSpec, config: DeviceConfig) -> DataSpec:
    """Return the request with what the settings select."""
    bits = 0 if config.bits == "auto" else config.bits
    only = () if config.classes == "own" else tuple(config.classes)
    return replace(spec, only=only, keep=config.keep, policy=config.policy, bits=bits)
