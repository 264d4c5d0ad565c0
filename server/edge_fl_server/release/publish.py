"""Publish signed releases as retained messages: chunks first, then targets and snapshot, and last the timestamp, which makes them current.

After a crash at any point devices still have the old release, and publishing again completes the new one. Released bytes are also kept on
the server's disk, next to the repository, to publish them again after the broker lost its data.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from edge_fl.blob import Blob, digest
from edge_fl.console.progress import Count, Watch, unwatched
from edge_fl.errors import ArtefactError, EdgeFLError, InputError
from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl.files.paths import text
from edge_fl.release.manifests import Manifest, blobs
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import JSON, Packet, Transport
from edge_fl_server.mqtt.chunks import LIMITS, ChunkLimits, clear_chunks, numbered, send_chunks
from edge_fl_server.release import agent_releases, website
from edge_fl_server.release.repository import Repository, superseded

log = logging.getLogger(__name__)

ON_DISK: Mapping[str, bytes] = {}  # no payloads in memory


class Publisher:
    """Publishes a repository's releases on a broker, and on its website if it has one (`edge_fl_server.release.website`)."""

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
        self._sent: dict[str, list[Blob]] = {}  # as `_kept`: releases whose chunks were sent

    def publish(self, manifest: Manifest, payloads: Mapping[str, bytes]) -> None:
        """Sign and publish a release; only the newest three are kept.

        `payloads` maps sha256 to bytes. Raises ArtefactError if they do not match the manifest or the disk fails, DeadlineError if the
        broker does not keep up.
        """
        # hashing, disk and broker run in parallel
        with ThreadPoolExecutor(2, "edge-fl-publish") as executor:
            checked = executor.submit(_require, manifest, payloads)
            kept = executor.submit(_keep, self._repository, manifest, payloads, checked.result)
            checked.result()
            self._send(_name(manifest), blobs(manifest), payloads)
        try:
            kept.result()
        except ArtefactError:
            for blob in self._unneeded({_name(manifest): blobs(manifest)}):
                clear_chunks(self._transport, self._topics, blob)
            raise
        self._commit(manifest)

    def republish(self, release: int) -> None:
        """Publish a kept release again, with a higher metadata version: a rollback of the fleet. Raises InputError."""
        self._repository.reload()
        kept = {manifest.release: manifest for manifest in self._repository.releases()}
        if release not in kept:
            raise InputError(f"release {release}: not kept, only {sorted(kept)} are")
        self._send(_name(kept[release]), blobs(kept[release]))
        self._commit(kept[release])

    def republish_all(self, *, chunks: bool = True) -> None:
        """Publish everything again, after the broker lost its data; metadata near its expiry is signed again first."""
        self._repository.refresh()
        if chunks:
            self._sent = {}
        self.publish_missing(metadata=True)

    def publish_missing(self, *, metadata: bool = False) -> None:
        """Publish the releases that another process has signed on disk since, and delete blobs that are no longer needed.

        With `metadata` the metadata is published even if there are none: other fields of it may have changed.
        """
        self._repository.reload()
        kept = self._kept()
        missing = [name for name in kept if name not in self._sent]
        if not (missing or metadata):
            return
        for name in missing:
            self._send(name, kept[name])
        self._send_metadata()
        self._clear_unneeded(self._sent)
        self._sent = kept

    def refresh(self) -> None:
        """Sign metadata near its expiry again and publish it; nothing is published if none is."""
        if self._repository.refresh():
            self._send_metadata()

    def repair(self, sha256: str, missing: Iterable[int]) -> bool:
        """Publish the chunks again that a device is missing; False if the blob belongs to no kept release."""
        known = {blob.sha256: blob for release in self._kept().values() for blob in release}
        blob = known.get(sha256)
        if blob is None or not (payload := self.kept(blob)):
            return False
        chunks = numbered(blob, payload, missing)
        send_chunks(self._transport, self._topics, blob, chunks, limits=self._limits)
        return True

    def kept(self, blob: Blob) -> bytes | None:
        """The content of a released blob from the disk; None if it is not there."""
        try:
            return self._path(blob).read_bytes()
        except FileNotFoundError:
            return None

    def clear(self, blob: Blob) -> None:
        """Delete a blob from the broker and from this server."""
        clear_chunks(self._transport, self._topics, blob)
        self._path(blob).unlink(missing_ok=True)

    def _commit(self, manifest: Manifest) -> None:
        """Make a release current after its chunks are on the broker; delete blobs that are no longer needed."""
        with self._repository.locked():
            before = self._kept()
            self._repository.publish(manifest)
        self._sent[_name(manifest)] = blobs(manifest)
        self._send_metadata()
        self._clear_unneeded(before)

    def _kept(self) -> dict[str, list[Blob]]:
        """The blobs of each kept release, of an extractor or of the agent, by its name."""
        agents = agent_releases.listed(self._repository)
        kept = {f"agent release {each.number}": [wheel.blob for wheel in each.wheels] for each in agents}
        return {_name(each): blobs(each) for each in self._repository.releases()} | kept

    def _unneeded(self, releases: Mapping[str, list[Blob]]) -> list[Blob]:
        """Blobs of these releases that no kept release needs."""
        needed = {blob.sha256 for each in self._kept().values() for blob in each}
        named = {blob.sha256: blob for each in releases.values() for blob in each}
        return [blob for sha256, blob in named.items() if sha256 not in needed]

    def _clear_unneeded(self, before: Mapping[str, list[Blob]]) -> None:
        for blob in self._unneeded(before):
            self.clear(blob)
        self._transport.drain(self._limits.drain_s)

    def _send(self, stage: str, required: list[Blob], payloads: Mapping[str, bytes] = ON_DISK) -> None:
        """Publish all chunks and wait for the broker; payloads that are missing are read from disk."""
        total, sent = sum(blob.bytes for blob in required), 0

        def on_sent(bytes: int) -> None:
            nonlocal sent
            sent += bytes
            self._watch(Count(stage, sent, total, bytes=True))

        on_sent(0)
        for blob in required:
            if payload := payloads.get(blob.sha256) or self.kept(blob):
                chunks = numbered(blob, payload)
                send_chunks(self._transport, self._topics, blob, chunks, limits=self._limits, on_sent=on_sent)
            else:
                log.warning(
                    "%s: %s is missing; its chunks cannot be published again",
                    stage,
                    text(self._path(blob)),
                )
        self._transport.drain(self._limits.drain_s)
        on_sent(total - sent)

    def _send_metadata(self) -> None:
        """Publish all metadata, the timestamp after broker and website have everything else."""
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
            if folder := website.kept_folder(self._repository):
                website.export(self._repository, folder)
        except EdgeFLError as error:
            # Devices download from the broker what the web server lacks.
            log.warning("%s; devices download from the broker only", error)

    def _retain(self, name: str, payload: bytes) -> None:
        self._transport.publish(Packet(self._topics.tuf(name), payload, retain=True, content_type=JSON))

    def _path(self, blob: Blob) -> Path:
        return self._repository.artefacts / blob.sha256


def store(repository: Repository, manifest: Manifest, payloads: Mapping[str, bytes]) -> None:
    """Sign a release on disk alone, for the server that is online, or the next one, to publish. Raises ArtefactError, InputError."""
    _require(manifest, payloads)
    _keep(repository, manifest, payloads, lambda: None)
    repository.publish(manifest)


def _name(manifest: Manifest) -> str:
    return f"release {manifest.release}"


def _keep(
    repository: Repository, manifest: Manifest, payloads: Mapping[str, bytes], check: Callable[[], None]
) -> None:
    """Write the blobs; each gets its final name after `check` has returned."""
    for blob in blobs(manifest):
        path = repository.artefacts / blob.sha256
        with reporting(str(path)):
            repository.artefacts.mkdir(exist_ok=True)
            with atomic.writing(path) as file:
                file.write(payloads.get(blob.sha256, b""))
                check()


def _require(manifest: Manifest, payloads: Mapping[str, bytes]) -> None:
    """Raise ArtefactError unless the payloads match every blob of the manifest."""
    for blob in blobs(manifest):
        payload = payloads.get(blob.sha256, b"")
        if len(payload) != blob.bytes or (found := digest(payload)) != blob.sha256:
            actual = f"sha256 {found[:8]}" if len(payload) == blob.bytes else f"{len(payload)} bytes"
            raise ArtefactError(
                f"blob {blob.sha256[:8]} of {blob.bytes} bytes: received {actual}",
                consequence="nothing was published",
            )
