"""The unpacked size of a wheel: what is signed, and what a device checks before and while it unpacks it.

A file of 100 KB can unpack to 100 MB. Python's zipfile yields at most the size that an archive states for each file, so the sum of these
sizes, which counts overlapping files too, is the most that can come out.
"""

from collections.abc import Iterable
from zipfile import ZipInfo

from edge_fl.console import units
from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure

MAX_FILES = 20_000
MAX_UNPACKED_BYTES = 1 << 30


def unpacked_bytes(name: str, files: Iterable[ZipInfo]) -> int:
    """The bytes of all files of a wheel. Raises ArtefactError ("bad_wheel") above the limits of any wheel."""
    sizes = [file.file_size for file in files]
    if len(sizes) > MAX_FILES or sum(sizes) > MAX_UNPACKED_BYTES:
        raise ArtefactError(
            f"{name}: {len(sizes):,} files of {units.size(sum(sizes))}; expected at most {MAX_FILES:,} of"
            f" {units.size(MAX_UNPACKED_BYTES)}",
            Failure.BAD_WHEEL,
        )
    return sum(sizes)
