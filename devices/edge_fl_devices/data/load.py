"""Read a device's data according to its settings: for full devices into memory, for head-only devices in batches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from edge_fl import __version__
from edge_fl.data import pictures
from edge_fl.data.samples import ClientData
from edge_fl.errors import ArtefactError, DataError
from edge_fl.failures import Failure
from edge_fl.inputs import InputSpec
from edge_fl_devices.board.capability import version
from edge_fl_devices.child import Progress, ignore
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import location, record, sources
from edge_fl_devices.data.picture_index import PictureIndex
from edge_fl_devices.data.report import DataReport
from edge_fl_devices.data.spec import UNKNOWN, DataSpec
from edge_fl_devices.data.split import SPLIT, DeviceSplit
from edge_fl_devices.data.stream import ImageStream, collect, facts_of

FEATURES = "features"
"""The folder of what is known of pictures, in the device's own."""

LoadData = Callable[[tuple[str, ...], InputSpec], ClientData]
"""Returns the device's data for these classes and this input, as they are now."""
StreamData = Callable[[tuple[str, ...], InputSpec], ImageStream]
"""The same, in batches."""


def load(source: str, spec: DataSpec = UNKNOWN, split: DeviceSplit = SPLIT) -> tuple[ClientData, DataReport]:
    """Read and split the images of `source` (see `sources.read`), resized to `spec.input`.

    Raises DataError: no source, fewer than two images, another number of channels than `spec.input`, labels outside the class list.
    """
    stream = ImageStream(sources.read(source, spec), split, f"{source}: ")
    return collect(stream), stream.report


def usable(data: ClientData, classes: Sequence[str], input: InputSpec, where: str, taker: str) -> ClientData:
    """Return the data in the size of `input`. Raises DataError without training images, or for labels or channels that do not fit.

    `where` begins the message, `taker` names what uses the data.
    """
    if not len(data.train):
        raise DataError(f"{where}no training samples on this device")
    for samples in (data.train, data.validation, data.test):
        if len(samples) and samples.y.max() >= len(classes):
            raise DataError(f"{where}labels up to {samples.y.max()}, {taker} takes {len(classes)} classes")
    sets = (data.train, data.validation, data.test)
    return ClientData(
        *(replace(samples, x=pictures.fit(samples.x, input, f"{where}{taker}")) for samples in sets)
    )


def streamer(config: DeviceConfig, files: frozenset[bytes] | None = None) -> StreamData:
    """Return a function that reads the data that these settings name in batches; `files` as of `DataSpec`."""

    def data(classes: tuple[str, ...], input: InputSpec) -> ImageStream:
        spec = DataSpec(classes, input, files=files)
        return _stream(config, replace(spec, index=_index(config, spec)))

    return data


def load_for(config: DeviceConfig, spec: DataSpec) -> tuple[ClientData, DataReport]:
    """Read the data that these settings name into memory. Raises DataError as `load`."""
    with recording(config):
        stream = _stream(config, replace(spec, index=_index(config, spec)))
        data = collect(stream)
        if stream.index:
            with suppress(ArtefactError):  # a full disk: the next reading decodes again
                stream.index.flush()
        return data, stream.report


def count_for(config: DeviceConfig, spec: DataSpec, progress: Progress = ignore) -> DataReport:
    """Summarise the data that these settings name; the pictures of a folder are not decoded. Raises DataError as `load`.

    progress: takes how many pictures are counted.
    """
    with recording(config):
        kind, folder = location.parsed(config.data)
        if kind != "folder":
            stream = _stream(config, spec)
            for _ in stream:
                pass
            return stream.report
        spec = with_settings(replace(spec, index=_index(config, spec)), config)
        return record.remember(Path(config.folder), sources.count(folder, spec, progress), spec)


@contextmanager
def recording(config: DeviceConfig) -> Iterator[None]:
    """Store the message of a DataError for `device status`."""
    try:
        yield
    except DataError as error:
        record.remember_problem(Path(config.folder), Failure.NO_DATA, error.message)
        raise


def _stream(config: DeviceConfig, spec: DataSpec) -> ImageStream:
    """Stream the data that these settings name; its report is stored for `device status`."""
    spec = with_settings(spec, config)
    split = _split(config)
    content = sources.read(config.data, spec)

    def remember(report: DataReport) -> DataReport:
        return record.remember(Path(config.folder), report, spec)

    return ImageStream(content, split, f"{config.data}: ", remember, spec.index)


def _split(config: DeviceConfig) -> DeviceSplit:
    return DeviceSplit(config.test_fraction, config.validation_fraction, config.seed, config.id)


def _index(config: DeviceConfig, spec: DataSpec) -> PictureIndex | None:
    """What is known of the pictures in this size; None for other data, and before the first release."""
    if not config.reads_folder or spec.input is None:
        return None
    key = _split(config).key
    decoders = (__version__, version("pillow"), version("pillow-heif"))  # other ones may give other pixels
    reading = (decoders, spec.input, spec.limits, key)
    return PictureIndex(Path(config.folder) / FEATURES, reading, partial(facts_of, split_key=key))


def with_settings(spec: DataSpec, config: DeviceConfig) -> DataSpec:
    """Return the request with what the settings select."""
    bits = 0 if config.bits == "auto" else config.bits
    return replace(spec, only=tuple(config.classes), keep=config.keep, policy=config.policy, bits=bits)
