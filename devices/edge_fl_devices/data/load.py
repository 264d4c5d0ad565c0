"""Load a device's data according to its settings: read the source, select, split, summarise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from edge_fl.data import pictures
from edge_fl.data.samples import ClientData, Samples
from edge_fl.errors import DataError
from edge_fl.inputs import InputSpec
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import record, sources
from edge_fl_devices.data.report import DataReport
from edge_fl_devices.data.selection import select
from edge_fl_devices.data.spec import UNKNOWN, DataSpec, SourceData
from edge_fl_devices.data.split import split

LoadData = Callable[[tuple[str, ...], InputSpec], ClientData]
"""Returns the device's data for these classes and this input; reads the source on every call."""


def load(
    source: str,
    spec: DataSpec = UNKNOWN,
    *,
    seed: int = 0,
    client: str = "",
    test_fraction: float = 0.25,
    validation_fraction: float = 0.1,
) -> tuple[ClientData, DataReport]:
    """Load and split the images of `source` (see `sources.read`), resized to `spec.input`.

    Raises DataError: no source, fewer than two images, another number of channels than `spec.input`, labels outside the class list.
    """
    if spec.input:
        pictures.require_pictures(spec.input, source)
    content = select(sources.read(source, spec), spec)
    if spec.input:
        content = _fitted(content, spec.input, source)
    if content.test is None:
        data = split(content.samples, test_fraction, validation_fraction, seed=seed, client=client)
    else:
        empty = content.samples.take(np.empty(0, np.int64))
        data = ClientData(content.samples, content.validation or empty, content.test)
    if spec.input:
        require_usable(data, content.classes, spec.input, f"{source}: ", "the extractor")
    counts = [part.counts(len(content.classes)) for part in (data.train, data.validation, data.test)]
    per_class = tuple(np.sum(counts, axis=0).tolist())
    return data, DataReport(content.classes, per_class, content.skipped, content.hints)


def _fitted(content: SourceData, input: InputSpec, source: str) -> SourceData:
    def fitted(samples: Samples) -> Samples:
        return replace(samples, x=pictures.fit(samples.x, input, source))

    return replace(
        content,
        samples=fitted(content.samples),
        validation=content.validation and fitted(content.validation),
        test=content.test and fitted(content.test),
    )


def require_usable(
    data: ClientData, classes: Sequence[str], input: InputSpec, where: str, taker: str
) -> None:
    """Raise DataError without training images, or for images or labels that `taker`, a run or an extractor, cannot use.

    `where` begins the message.
    """
    if not len(data.train):
        raise DataError(f"{where}no training samples on this device")
    for samples in (data.train, data.validation, data.test):
        if len(samples) and (samples.shape != input.shape or samples.y.max() >= len(classes)):
            raise DataError(
                f"{where}images of {list(samples.shape)} with labels up to {samples.y.max()}, {taker} takes"
                f" {list(input.shape)} [C, H, W] and {len(classes)} classes"
            )


def loader(config: DeviceConfig) -> LoadData:
    """Return a function that loads the data that these settings name."""

    def data(classes: tuple[str, ...], input: InputSpec) -> ClientData:
        return load_for(config, DataSpec(classes, input))[0]

    return data


def count_for(config: DeviceConfig, spec: DataSpec) -> DataReport:
    """Summarise the data that these settings name; pictures are decoded only if `spec.input` is known. Raises DataError as `load`."""
    with _recording(config):
        kind, location = sources.parsed(config.data)
        if spec.input or kind != "folder":
            return load_for(config, spec)[1]
        spec = _with_settings(spec, config)
        return record.remember(Path(config.folder), sources.count(location, spec), spec)


def load_for(config: DeviceConfig, spec: DataSpec) -> tuple[ClientData, DataReport]:
    """Load the data that these settings name. Raises DataError as `load`."""
    with _recording(config):
        spec = _with_settings(spec, config)
        data, report = load(
            config.data,
            spec,
            seed=config.seed,
            client=config.id,
            test_fraction=config.test_fraction,
            validation_fraction=config.validation_fraction,
        )
        return data, record.remember(Path(config.folder), report, spec)


@contextmanager
def _recording(config: DeviceConfig) -> Iterator[None]:
    """Store the message of a DataError for `device status`."""
    try:
        yield
    except DataError as error:
        record.remember_problem(Path(config.folder), "no_data", error.message)
        raise


def _with_settings(spec: DataSpec, config: DeviceConfig) -> DataSpec:
    return replace(spec, only=tuple(config.classes), keep=config.keep, policy=config.policy)
