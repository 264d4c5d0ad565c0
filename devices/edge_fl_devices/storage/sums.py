"""What a device records of its secure sums, in FOLDER/statistics/sums.json."""

from pathlib import Path

import msgspec
from msgspec import Struct

from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.files.shared import make_folder
from edge_fl_devices.storage import read_json

FILE = "statistics/sums.json"
"""Among what a device keeps when its work is deleted (`upkeep.folder.LEDGERS`)."""


class SumRecord(Struct, frozen=True):
    """The sum `id` for which a vector left last, and `number`, that of the signature that opened it (0: not signed).

    `declined`: why the device took no part in a later one; "" if it did not decline one.
    """

    id: str = ""
    number: int = 0
    declined: str = ""


def read(folder: Path) -> SumRecord:
    """The record in a device's folder."""
    return read_json(folder / FILE, SumRecord) or SumRecord()


def write(folder: Path, record: SumRecord) -> None:
    """Replace the record. Raises ArtefactError if the disk fails."""
    if record != read(folder):
        with reporting(FILE):
            make_folder((folder / FILE).parent)
            atomic.write(folder / FILE, msgspec.json.encode(record), private=True)
