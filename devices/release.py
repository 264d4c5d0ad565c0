"""What a head-only device does with a release: believe its metadata, install it, compute features, fit and judge the personal head.

The head and the extractor that it was fitted on are one pair, replaced in one step by one file; until then the old pair serves, and a
head is never used with another extractor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devices import canary
from devices.effects import Fit, Install, Job, Refresh
from devices.events import Event, Failed, Installed, Refreshed
from devices.features import Extractor, FeatureCache, require_runnable
from devices.fetch import Sink
from devices.head import Fitter, Order
from devices.state import LIMITS, Limits
from devices.store import Pair, Store
from devices.work import Data, Worker
from edge_fl import metrics
from edge_fl.data.samples import ClientData, Samples
from edge_fl.errors import DataError
from edge_fl.heads import Head
from edge_fl.release import artefact
from edge_fl.release.artefact import Slots
from edge_fl.release.manifest import Manifest, blobs
from edge_fl.release.trust import Trust
from edge_fl.wire.blob import Assembly, Blob
from edge_fl.wire.messages import Report


@dataclass(frozen=True, slots=True)
class _KeptChunks:
    """Chunks that go to the disk, into a release's folder."""

    slots: Slots
    blob: Blob

    @property
    def missing(self) -> list[int]:
        return self.slots.missing(self.blob)

    def add(self, index: int, payload: bytes) -> bool:
        return self.slots.add_chunk(self.blob, index, payload)


class HeadWorker(Worker):
    """Installs releases and fits heads of one `kind` on the device's data."""

    def __init__(
        self,
        device: str,
        store: Store,
        data: Data,
        kind: str,
        fitter: Fitter,
        *,
        root: bytes | None = None,
        check: Callable[[artefact.Installed], None] = canary.require,
        limits: Limits = LIMITS,
    ) -> None:
        super().__init__(device, store, limits)
        self._data, self._kind, self._fitter, self._check = data, kind, fitter, check
        self._slots = Slots(store.folder / "release")
        self._trust = Trust(store.folder / "tuf", root, trust_on_first_use=root is None)
        self._cache = FeatureCache(store.folder / "features")
        self._jobs: dict[type, Callable[..., Event]] = {
            Refresh: self._refresh,
            Install: self._install,
            Fit: self._fit,
        }

    def boot(self) -> int:
        super().boot()
        self._slots.boot()
        pair = self.store.pair()
        return pair.release if pair and self._made_by(pair.head.extractor) else 0

    def sink(self, blob: Blob, *, keep: bool) -> Sink:
        return _KeptChunks(self._slots, blob) if keep else Assembly(blob)

    def perform(self, job: Job, material: Mapping[str, bytes] | bytes | None) -> Event:
        carry_out = self._jobs.get(type(job))
        return carry_out(job, material) if carry_out else Failed("unsupported_tier", final=True)

    def release_is_good(self) -> None:
        self._slots.mark_good()

    def revoke(self) -> None:
        self.store.revoke()

    def _refresh(self, job: Refresh, files: Mapping[str, bytes]) -> Event:
        manifests = self._trust.refresh(files.__getitem__)
        manifest = next((found for found in manifests if found.release == job.release), None)
        if manifest is None:
            known = ", ".join(str(found.release) for found in manifests)
            return Failed("missing", detail=f"release {job.release} is not among the signed ones ({known})")
        current = self._slots.current()
        if current and current.manifest == manifest:
            return Refreshed(manifest, installed=True)
        require_runnable(manifest)
        self._slots.prepare(manifest)
        return Refreshed(manifest, tuple(blob for blob in blobs(manifest) if self._slots.missing(blob)))

    def _install(self, job: Install, _: object) -> Event:
        self._slots.install(job.manifest, check=self._check)
        return Installed(job.manifest.release)

    def _fit(self, job: Fit, _: object) -> Event:
        started_s = time.monotonic()
        installed = self._slots.current()
        if installed is None:
            return Failed("incomplete", detail="there is no release to fit a head on")
        manifest = installed.manifest
        data = self._data(tuple(manifest.classes), manifest.input)
        _require_usable(data, manifest)
        extractor = Extractor(installed.extractor, manifest)
        before = self._accuracies(
            self.store.pair(), data, (metrics.PERSONAL_BEFORE, metrics.PERSONAL_VALIDATION_BEFORE)
        )
        order = Order(
            self._kind, len(manifest.classes), manifest.unit_norm, extractor.sha256, seed=manifest.round
        )
        head = self._fitter(order, self._cache.features(extractor, data.train.x), data.train.y)
        after = _accuracies(
            head, self._features(extractor), data, (metrics.PERSONAL_AFTER, metrics.PERSONAL_VALIDATION_AFTER)
        )
        sizes = {
            metrics.TEST_SAMPLES: float(len(data.test)),
            metrics.VALIDATION_SAMPLES: float(len(data.validation)),
        }
        report = Report(
            job.want.id,
            "head",
            job.boot,
            len(data.train),
            {**sizes, **before, **after},
            release=manifest.release,
            extractor=extractor.sha256,
            head=head.kind,
            seconds=time.monotonic() - started_s,
            bytes_down=job.bytes_down,
        )
        self.store.keep_pair(Pair(head, manifest.release, self.parcel(job.want, report)))
        return self.finish(job.want, report)

    def _accuracies(self, pair: Pair | None, data: ClientData, names: tuple[str, str]) -> dict[str, float]:
        """Those of the pair that serves; none if there is none, or its extractor is gone."""
        installed = self._made_by(pair.head.extractor) if pair else None
        if pair is None or installed is None:
            return {}
        extractor = Extractor(installed.extractor, installed.manifest)
        return _accuracies(pair.head, self._features(extractor), data, names)

    def _features(self, extractor: Extractor) -> Callable[[Samples], NDArray[np.float32]]:
        return lambda samples: self._cache.features(extractor, samples.x)

    def _made_by(self, extractor_sha256: str) -> artefact.Installed | None:
        return find_installed(self._slots, extractor_sha256)


def find_installed(slots: Slots, extractor_sha256: str) -> artefact.Installed | None:
    """The installed release with this extractor, be it the current one or the one before."""
    for installed in (slots.current(), slots.previous()):
        if installed and installed.manifest.extractor.sha256 == extractor_sha256:
            return installed
    return None


def _accuracies(
    head: Head, features: Callable[[Samples], NDArray[np.float32]], data: ClientData, names: tuple[str, str]
) -> dict[str, float]:
    """Accuracy on test and validation, under these names, where there are samples."""
    found = {}
    for name, samples in zip(names, (data.test, data.validation), strict=True):
        if len(samples):
            found[name] = metrics.accuracy(head.predict(features(samples)), samples.y)
    return found


def _require_usable(data: ClientData, manifest: Manifest) -> None:
    if not len(data.train):
        raise DataError("no training samples on this device; no head was fitted")
    for samples in (data.train, data.validation, data.test):
        if len(samples) and samples.shape != manifest.input.shape:
            raise DataError(
                f"images are {list(samples.shape)}, release {manifest.release} takes {list(manifest.input.shape)}; no head was fitted"
            )
    if (highest := int(np.max(data.train.y))) >= len(manifest.classes):
        raise DataError(
            f"label {highest}, release {manifest.release} knows {len(manifest.classes)} classes; no head was fitted"
        )
