"""The releases of a head-only device: looked up in the signed metadata, fetched in a precision that suits the board, and installed.

What an exported repository (`edge-fl release export`) on a web server or on the device's own card has of a release is taken from there.
Neither is trusted: the files are named by signed metadata that arrived over MQTT, and every chunk is verified before it is kept. A failure
ends the attempt; what is still missing is fetched from the broker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import urllib3
from msgspec.structs import replace
from urllib3.exceptions import HTTPError

from edge_fl import metrics
from edge_fl.blob import Blob
from edge_fl.errors import ArtefactError
from edge_fl.failures import Failure
from edge_fl.release.manifests import Manifest, Precision, blobs, paths
from edge_fl_devices.agent.effects import Install, Refresh
from edge_fl_devices.agent.events import Event, Failed, Installed, Refreshed
from edge_fl_devices.data import record
from edge_fl_devices.features.onnx_runtime import Runtime, require_runnable
from edge_fl_devices.install.fetch import Sink
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.serving.served_model import serving
from edge_fl_devices.storage.slots import InstalledRelease, Slots
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers.worker import Material

log = logging.getLogger(__name__)

MIRROR_IDLE_S = 20.0  # without data
MIRROR_TOTAL_S = 3600.0  # for one file
LOCAL = "file://"
MEBIBYTE = 1024 * 1024
RUNTIME_FACTOR = 3  # memory that an extractor takes while it runs, as a multiple of its file size
MEMORY_SHARE = 4  # an extractor may take one part in four of the memory


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
        local = address.startswith(LOCAL)
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
    until_s = time.monotonic() + MIRROR_TOTAL_S
    stop = min(blob.bytes, (last + 1) * blob.chunk_bytes)
    response = urllib3.request(
        "GET",
        address,
        headers={"Range": f"bytes={first * blob.chunk_bytes}-{stop - 1}", "Accept-Encoding": "identity"},
        preload_content=False,
        decode_content=False,
        timeout=MIRROR_IDLE_S,
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
                raise HTTPError(f"not complete after {MIRROR_TOTAL_S:g} s")
    finally:
        response.close()


def _read(address: str, blob: Blob, first: int, last: int) -> Iterator[tuple[int, bytes]]:
    """Yield the chunks `first` to `last` of a file. Raises OSError."""
    with Path(address.removeprefix(LOCAL)).open("rb") as file:
        file.seek(first * blob.chunk_bytes)
        for index in range(first, last + 1):
            yield index, file.read(blob.chunk_bytes)


@dataclass(frozen=True, slots=True)
class PrecisionLimits:
    """Precision, or "auto": int8 where float32 takes too much of `memory_mb` (0: unlimited) or more than `latency_ms` per sample."""

    precision: Literal["auto", "fp32", "int8"] = "auto"
    memory_mb: int = 0
    latency_ms: float = 250.0


PRECISION_LIMITS = PrecisionLimits()


def choose_precision(
    manifest: Manifest, limits: PrecisionLimits, serving: Manifest | None, measured_ms: float
) -> Precision:
    """Choose the precision for `manifest`, given the release served so far and its latency per sample (0: not measured).

    A device that uses int8 keeps it, since its measurement says nothing about float32.
    """
    if "int8" not in manifest.variants or limits.precision == "fp32":
        return "fp32"
    needed_bytes = RUNTIME_FACTOR * manifest.extractor.bytes
    too_large = bool(limits.memory_mb) and needed_bytes > limits.memory_mb * MEBIBYTE / MEMORY_SHARE
    too_slow = serving is not None and (serving.precision == "int8" or measured_ms > limits.latency_ms)
    return "int8" if limits.precision == "int8" or too_large or too_slow else "fp32"


@dataclass(frozen=True, eq=False)
class DeviceReleases:
    """trust: verifies the metadata. runtime: the board's onnxruntime as last measured. check: the canary. mirror: asked first."""

    store: Store
    slots: Slots
    trust: Trust
    runtime: Callable[[], Runtime]
    check: Callable[[InstalledRelease], None]
    precision: PrecisionLimits
    mirror: Mirror | None = None

    def boot(self) -> int:
        """Clean up once per process start; report new crash loops; return the release that is served, or 0."""
        blocked = self.slots.blocked
        self.slots.boot()
        for release in self.slots.blocked.keys() - blocked.keys():
            self._report_crash_loop(release)
        served = serving(self.store, self.slots)
        return served.stored.release if served else 0

    def refresh(self, job: Refresh, material: Material) -> Event:
        """Verify the signed metadata, given by file, and prepare the download of the release."""
        manifests = self.trust.refresh((material or {}).__getitem__)
        manifest = next((signed for signed in manifests if signed.release == job.release), None)
        if manifest is None:
            known = ", ".join(str(signed.release) for signed in manifests)
            return Failed(
                Failure.MISSING, detail=f"release {job.release} is not among the signed ones ({known})"
            )
        manifest = manifest.chosen(self._choose_precision(manifest))
        current = self.slots.current()
        if current and current.manifest == manifest:
            return Refreshed(manifest, installed=True)
        require_runnable(manifest, self.runtime())
        self.slots.prepare(manifest)
        transferred = self._fetch_from_mirror(manifest)
        missing = tuple(blob for blob in blobs(manifest) if self.slots.sink(blob).missing)
        return Refreshed(manifest, missing, bytes=transferred)

    def install(self, job: Install, material: Material) -> Event:
        """Run the canary and make the release the current one."""
        with record.noting_deaths(self.store.folder):
            self.slots.install(job.manifest, check=self.check)
        return Installed(job.manifest.release)

    def _choose_precision(self, manifest: Manifest) -> Precision:
        served = serving(self.store, self.slots)
        if served is None:
            return choose_precision(manifest, self.precision, None, 0.0)
        measured_ms = served.stored.parcel.report.metrics.get(metrics.LATENCY_AFTER, 0.0)
        return choose_precision(manifest, self.precision, served.installed.manifest, measured_ms)

    def _fetch_from_mirror(self, manifest: Manifest) -> int:
        """Fetch what the owner's web server, if any, has of the release; return the bytes transferred."""
        if self.mirror is None:
            return 0
        files = paths(manifest).items()
        return sum(self.mirror.fetch(path, blob, self.slots.sink(blob)) for path, blob in files)

    def _report_crash_loop(self, release: int) -> None:
        """Turn the unsent reports on a release into reports of its crash loop."""
        for parcel in self.store.outbox():
            if parcel.report.release == release:
                report = replace(parcel.report, error=Failure.CRASH_LOOP, metrics={}, head="", extractor="")
                self.store.keep(replace(parcel, report=report))
