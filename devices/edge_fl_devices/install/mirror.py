"""Get a release from an exported repository (`edge-fl release export`) on a web server or on the device's own card, before the broker.

Neither is trusted: the files are named by signed metadata that arrived over MQTT, and every chunk is verified before it is kept.
Any failure ends the attempt; what is still missing is fetched from the broker.
"""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import urllib3
from urllib3.exceptions import HTTPError

from edge_fl.blob import Blob
from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl_devices.install.fetch import Sink

log = logging.getLogger(__name__)

IDLE_S = 20.0  # without data
TOTAL_S = 3600.0  # for one file


FILE = "file://"


class Mirror:
    """An exported repository, by its address: `https://host/releases` or `file:///opt/edge-fl/releases`."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")

    def fetch(self, path: str, blob: Blob, sink: Sink) -> int:
        """Fetch the missing chunks of the blob at `path`, as far as the mirror has them; return the bytes that a web server sent.

        Raises ArtefactError if the disk fails.
        """
        address, transferred, missing = f"{self._address}/targets/{path}", 0, set(sink.missing)
        if not missing:
            return 0
        local = address.startswith(FILE)
        chunks = _read if local else _download
        try:
            for index, chunk in chunks(address, blob, min(missing), max(missing)):
                transferred += 0 if local else len(chunk)
                if index in missing:
                    sink.add(index, chunk)
        except (HTTPError, OSError, ArtefactError) as error:
            if isinstance(error, ArtefactError) and error.why not in (None, Failure.CHUNK_HASH):
                raise
            log.warning("%s: %s; the rest is fetched from the broker", address, error)
        return transferred


def _download(address: str, blob: Blob, first: int, last: int) -> Iterator[tuple[int, bytes]]:
    """Yield the chunks `first` to `last`, or from 0 if the server supports no ranges. Raises HTTPError, OSError."""
    until_s = time.monotonic() + TOTAL_S
    stop = min(blob.bytes, (last + 1) * blob.chunk_bytes)
    response = urllib3.request(
        "GET",
        address,
        headers={"Range": f"bytes={first * blob.chunk_bytes}-{stop - 1}", "Accept-Encoding": "identity"},
        preload_content=False,
        decode_content=False,
        timeout=IDLE_S,
        retries=urllib3.Retry(connect=1, read=0, redirect=3),
    )
    try:
        if response.status not in (200, 206):
            raise HTTPError(f"status {response.status}, expected the file")
        for index in range(first if response.status == 206 else 0, last + 1):
            size = min(blob.chunk_bytes, stop - index * blob.chunk_bytes)
            if len(chunk := response.read(size)) < size:
                raise HTTPError(f"ended within chunk {index} of {len(blob.chunks)}")
            yield index, chunk
            if time.monotonic() > until_s:
                raise HTTPError(f"not complete after {TOTAL_S:g} s")
    finally:
        response.close()


def _read(address: str, blob: Blob, first: int, last: int) -> Iterator[tuple[int, bytes]]:
    """Yield the chunks `first` to `last` of a file. Raises OSError."""
    with Path(address.removeprefix(FILE)).open("rb") as file:
        file.seek(first * blob.chunk_bytes)
        for index in range(first, last + 1):
            yield index, file.read(blob.chunk_bytes)
