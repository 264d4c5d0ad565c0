"""A release's bytes over HTTP: from a web server that has the signed repository (`edge-fl release export`), before the broker is asked.

Nothing is trusted there. What is fetched is named by signed metadata that came over MQTT, and every chunk is verified before it is kept,
as if the broker had sent it. Whatever goes wrong ends the attempt: what is still missing comes from the broker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import urllib3
from urllib3.exceptions import HTTPError

from devices.install.fetch import Sink
from edge_fl.errors import ArtefactError
from edge_fl.wire.blob import Blob

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MirrorLimits:
    """A server that says nothing for `silence_s`, or is not done after `whole_s`, is left to itself."""

    silence_s: float = 20.0
    whole_s: float = 3600.0


class Mirror:
    """One web server, by the address of the exported folder (`https://host/releases`)."""

    def __init__(self, address: str, limits: MirrorLimits = MirrorLimits()) -> None:
        self._address, self._limits = address.rstrip("/"), limits

    def fill(self, path: str, blob: Blob, sink: Sink) -> int:
        """Fetches what `sink` misses of the blob at `path` -> the bytes that came; fewer than were missing when the server fails.

        Raises ArtefactError when the disk fails.
        """
        address, came, missing = f"{self._address}/targets/{path}", 0, set(sink.missing)
        try:
            for index, chunk in self._chunks(address, blob, min(missing), max(missing)) if missing else ():
                came += len(chunk)
                if index in missing:
                    sink.add(index, chunk)
        except (HTTPError, OSError) as error:
            log.warning("%s: %s; the broker is asked for the rest", address, error)
        except ArtefactError as error:
            if error.why not in ("", "chunk_hash"):
                raise
            log.warning("%s: %s; the broker is asked for the rest", address, error)
        return came

    def _chunks(self, address: str, blob: Blob, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        """The chunks `first` to `last`; from 0 on, of a server that knows no ranges. Raises HTTPError, OSError."""
        until_s = time.monotonic() + self._limits.whole_s
        stop = min(blob.bytes, (last + 1) * blob.chunk_bytes)
        response = urllib3.request(
            "GET",
            address,
            headers={"Range": f"bytes={first * blob.chunk_bytes}-{stop - 1}", "Accept-Encoding": "identity"},
            preload_content=False,
            decode_content=False,
            timeout=self._limits.silence_s,
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
                    raise HTTPError(f"not done after {self._limits.whole_s:g} s")
        finally:
            response.close()
