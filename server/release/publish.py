"""From a signed release to retained messages: chunks first, then targets, snapshot and, last, the timestamp that makes it current.

A crash at any point leaves devices with the old release, and publishing again finishes the work. What is published is also kept on
the server's disk, beside the repository, so that everything can be put back after a broker lost its data.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from edge_fl.console.progress import Count, Watch, unwatched
from edge_fl.errors import ArtefactError, EdgeFLError, InputError
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.release.manifest import Manifest, blobs
from edge_fl.wire.blob import Blob, digest
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import JSON, Packet, Transport
from server.mqtt.chunks import LIMITS, ChunkLimits, clear_chunks, send_chunks
from server.release import website
from server.release.repository import Repository, superseded

log = logging.getLogger(__name__)


NONE_AT_HAND: Mapping[str, bytes] = {}


class Publisher:
    """Puts a repository's releases on a broker and keeps them there; on the website that it is to have, too (`server.release.website`)."""

    def __init__(
        self,
        transport: Transport,
        topics: Topics,
        repository: Repository,
        limits: ChunkLimits = LIMITS,
        *,
        watch: Watch = unwatched,
    ) -> None:
        self._transport, self._topics, self._repository, self._limits = transport, topics, repository, limits
        self._watch = watch

    def publish(self, manifest: Manifest, payloads: Mapping[str, bytes]) -> None:
        """Signs and publishes a release; older ones beyond the last three are cleared.

        `payloads` maps sha256 to bytes. Raises ArtefactError when they are not what the manifest says or the disk does not take them,
        DeadlineError when the broker does not.
        """
        # hash, disk and broker take their times side by side
        with ThreadPoolExecutor(2, "edge-fl-publish") as aside:
            checked = aside.submit(_require, manifest, payloads)
            kept = aside.submit(self._keep, manifest, payloads, checked)
            checked.result()
            self._send(manifest, payloads)
        try:
            kept.result()
        except ArtefactError:
            for blob in self._unneeded([manifest]):
                clear_chunks(self._transport, self._topics, blob)
            raise
        self._commit(manifest)

    def republish(self, release: int) -> None:
        """Publishes a kept release again, under a higher metadata version: what a rollback of the fleet is. Raises InputError."""
        kept = {manifest.release: manifest for manifest in self._repository.releases()}
        if release not in kept:
            raise InputError(f"release {release}: not kept, only {sorted(kept)} are")
        self._send(kept[release])
        self._commit(kept[release])

    def reassert(self, *, chunks: bool = True) -> None:
        """Publishes everything again, as after a broker lost its data; metadata that is near its expiry is signed again first."""
        self._repository.refresh()
        if chunks:
            for manifest in self._repository.releases():
                self._send(manifest)
        self._send_metadata()

    def repair(self, sha256: str, missing: Iterable[int]) -> bool:
        """Retains again the chunks that a device asked for; False when the blob is of no kept release."""
        wanted = {blob.sha256: blob for manifest in self._repository.releases() for blob in blobs(manifest)}
        blob = wanted.get(sha256)
        if blob is None or not (payload := self._kept(blob)):
            return False
        known = [index for index in missing if 0 <= index < len(blob.chunks)]
        send_chunks(self._transport, self._topics, blob, payload, only=known, limits=self._limits)
        return True

    def clear(self, blob: Blob) -> None:
        """Makes the broker and this server forget one blob."""
        clear_chunks(self._transport, self._topics, blob)
        self._path(blob).unlink(missing_ok=True)

    def _commit(self, manifest: Manifest) -> None:
        """Makes a release current whose chunks the broker has, and clears those of the releases that are no longer kept."""
        before = self._repository.releases()
        self._repository.publish(manifest)
        self._send_metadata()
        for blob in self._unneeded(before):
            self.clear(blob)
        self._transport.drain(self._limits.drain_s)

    def _send(self, manifest: Manifest, payloads: Mapping[str, bytes] = NONE_AT_HAND) -> None:
        """The chunks, all taken by the broker when this returns; what is not at hand is read from the disk."""
        stage, total, sent = f"release {manifest.release}", sum(blob.bytes for blob in blobs(manifest)), 0

        def taken(bytes: int) -> None:
            nonlocal sent
            sent += bytes
            self._watch(Count(stage, sent, total, bytes=True))

        taken(0)
        for blob in blobs(manifest):
            if payload := payloads.get(blob.sha256) or self._kept(blob):
                send_chunks(self._transport, self._topics, blob, payload, limits=self._limits, taken=taken)
            else:
                log.warning(
                    "release %d: %s is gone; its chunks cannot be sent again",
                    manifest.release,
                    self._path(blob),
                )
        self._transport.drain(self._limits.drain_s)
        taken(total - sent)

    def _send_metadata(self) -> None:
        """The timestamp goes out when the broker, and the web server, have all the rest."""
        self._export()
        for name, payload in self._repository.files():
            if name == "timestamp.json":
                self._transport.drain(self._limits.drain_s)
            self._retain(name, payload)
            for obsolete in superseded(name):
                self._retain(obsolete, b"")
        self._transport.drain(self._limits.drain_s)

    def _export(self) -> None:
        try:
            if folder := website.kept(self._repository):
                website.export(self._repository, folder)
        except EdgeFLError as error:
            # The broker has everything, and devices ask it for what a web server lacks.
            log.warning("%s; devices are served by the broker alone", error)

    def _retain(self, name: str, payload: bytes) -> None:
        self._transport.publish(Packet(self._topics.tuf(name), payload, retain=True, content_type=JSON))

    def _unneeded(self, manifests: list[Manifest]) -> list[Blob]:
        """The blobs of these that no kept release has."""
        needed = {blob.sha256 for manifest in self._repository.releases() for blob in blobs(manifest)}
        named = {blob.sha256: blob for manifest in manifests for blob in blobs(manifest)}
        return [blob for sha256, blob in named.items() if sha256 not in needed]

    def _keep(self, manifest: Manifest, payloads: Mapping[str, bytes], checked: Future[None]) -> None:
        """Writes the blobs, each under its name only once they are `checked`."""
        for blob in blobs(manifest):
            with reporting(str(self._path(blob))):
                self._repository.artefacts.mkdir(exist_ok=True)
                with atomic.writing(self._path(blob)) as file:
                    file.write(payloads.get(blob.sha256, b""))
                    checked.result()

    def _kept(self, blob: Blob) -> bytes | None:
        try:
            return self._path(blob).read_bytes()
        except FileNotFoundError:
            return None

    def _path(self, blob: Blob) -> Path:
        return self._repository.artefacts / blob.sha256


def _require(manifest: Manifest, payloads: Mapping[str, bytes]) -> None:
    """Raises ArtefactError unless every blob of the manifest is there, to the byte."""
    for blob in blobs(manifest):
        payload = payloads.get(blob.sha256, b"")
        if len(payload) != blob.bytes or (found := digest(payload)) != blob.sha256:
            came = f"sha256 {found[:8]}" if len(payload) == blob.bytes else f"{len(payload)} bytes"
            raise ArtefactError(
                f"blob {blob.sha256[:8]} of {blob.bytes} bytes: {came} came",
                consequence="nothing was published",
            )
