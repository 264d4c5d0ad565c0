"""A device's data as its settings name them: read from the source, chosen, split, and reported in numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from devices.config import DeviceConfig
from devices.data import report as reports
from devices.data import sources
from devices.data.report import DataReport
from devices.data.selection import select
from devices.data.spec import UNKNOWN, DataSpec
from devices.data.split import split
from edge_fl.config import InputSpec
from edge_fl.data.samples import ClientData, Samples
from edge_fl.errors import DataError

LoadData = Callable[[tuple[str, ...], InputSpec], ClientData]
"""The device's own data, for these classes and this input; asked for anew whenever they are needed."""


def load(
    source: str,
    spec: DataSpec = UNKNOWN,
    *,
    seed: int = 0,
    client: str = "",
    test_fraction: float = 0.25,
    validation_fraction: float = 0.1,
) -> tuple[ClientData, DataReport]:
    """A device's images, split. `source` is as `sources.read` takes it.

    Raises DataError: nothing there, fewer than two images, images that the extractor does not take, labels outside the class list.
    """
    found = select(sources.read(source, spec), spec)
    if found.test is None:
        data = split(found.samples, test_fraction, validation_fraction, seed=seed, client=client)
    else:
        data = ClientData(
            found.samples, found.validation or found.samples.take(np.empty(0, np.int64)), found.test
        )
    if spec.input:
        _require_shape(data.train, spec.input, source)
    return data, reports.report(source, found, data)


def loader(config: DeviceConfig) -> LoadData:
    """A device's own data, read from its source whenever they are asked for."""

    def data(classes: tuple[str, ...], input: InputSpec) -> ClientData:
        return load_for(config, DataSpec(classes, input))[0]

    return data


def load_for(config: DeviceConfig, spec: DataSpec) -> tuple[ClientData, DataReport]:
    """The data that a device's settings name. Raises DataError."""
    return load(
        config.data,
        replace(spec, only=tuple(config.classes), keep=config.keep, policy=config.policy),
        seed=config.seed,
        client=config.id,
        test_fraction=config.test_fraction,
        validation_fraction=config.validation_fraction,
    )


def _require_shape(samples: Samples, expected: InputSpec, source: str) -> None:
    if samples.shape != expected.shape:
        raise DataError(
            f"{source}: images of {list(samples.shape)}, the extractor takes {list(expected.shape)} [C, H, W]"
        )
