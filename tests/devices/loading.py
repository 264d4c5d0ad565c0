"""Data of a source in memory, read and split as on a device, without its settings."""

from edge_fl.data.samples import ClientData
from edge_fl_devices.data import sources
from edge_fl_devices.data.load import SampleStream, collect
from edge_fl_devices.data.record import DataReport
from edge_fl_devices.data.spec import UNKNOWN, DataSpec
from edge_fl_devices.data.split import SPLIT, DeviceSplit


def loaded(
    source: str, spec: DataSpec = UNKNOWN, split: DeviceSplit = SPLIT
) -> tuple[ClientData, DataReport]:
    """Read and split the images of a source (see `sources.read`), resized to `spec.input`."""
    stream = SampleStream(sources.read(source, spec), split, f"{source}: ")
    return collect(stream), stream.report
