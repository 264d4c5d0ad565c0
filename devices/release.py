"""What a head-only device does with a release: believe its metadata, install it, compute features, fit and judge the personal head.

A release has proved itself when its extractor has computed the features of all the device's own images and a head is fitted; a
process that dies three times before that is a crash loop, and the release before it serves again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from devices import canary, uploads
from devices.effects import Fit, Install, Job, Refresh
from devices.events import Event, Failed, Installed, Refreshed
from devices.features import Extractor, FeatureCache, require_runnable
from devices.fetch import Sink
from devices.head import Fitter, Order
from devices.pair import installed_extractors, serving
from devices.state import LIMITS, Limits
from devices.store import Store, StoredHead
from devices.work import Data, Worker
from edge_fl import metrics
from edge_fl.data.samples import ClientData, Samples
from edge_fl.errors import DataError
from edge_fl.heads import Head, Tuned
from edge_fl.heads.head import Array
from edge_fl.heads.tuned import OWN
from edge_fl.release import artefact
from edge_fl.release.artefact import Slots
from edge_fl.release.manifest import Manifest, blobs
from edge_fl.release.trust import Trust
from edge_fl.wire.blob import Assembly, Blob, describe
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
    """Installs releases and fits heads of one `kind` on the device's data; with `share` off, only numbers are ever sent back."""

    def __init__(
        self,
        device: str,
        store: Store,
        data: Data,
        kind: str,
        fitter: Fitter,
        *,
        root: bytes | None = None,
        share: bool = True,
        check: Callable[[artefact.Installed], None] = canary.require,
        limits: Limits = LIMITS,
    ) -> None:
        super().__init__(device, store, limits)
        self._data, self._kind, self._fitter, self._check = data, kind, fitter, check
        self._share = share
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
        refused = self._slots.refused
        self._slots.boot()
        for release in self._slots.refused.keys() - refused.keys():
            self._report_rollback(release)
        pair = serving(self.store, self._slots)
        return pair.stored.release if pair else 0

    def sink(self, blob: Blob, *, keep: bool) -> Sink:
        return _KeptChunks(self._slots, blob) if keep else Assembly(blob)

    def perform(self, job: Job, material: Mapping[str, bytes] | bytes | None) -> Event:
        carry_out = self._jobs.get(type(job))
        return carry_out(job, material) if carry_out else Failed("unsupported_tier", final=True)

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
        before = self._accuracies_before(data)
        order = Order(
            self._kind,
            len(manifest.classes),
            manifest.unit_norm,
            extractor.sha256,
            seed=manifest.round,
            plan=manifest.heads,
        )
        z, extras = self._cache.features(extractor, data.train.x), self._extras(installed)
        head = self._fitter(order, z, data.train.y, extras)
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
        stored = StoredHead(head, manifest.release, self.parcel(job.want, report))
        self.store.keep_head(stored, installed_extractors(self._slots))
        self._slots.mark_good()
        asked = (
            self._share and job.want.version > 0
        )  # a device that fits anew on its own account sends numbers only
        blob = uploads.parts_for(manifest, head, z, data.train.y, extras) if asked else None
        return self.finish(job.want, replace(report, blob=describe(blob) if blob else None), blob)

    def _extras(self, installed: artefact.Installed) -> dict[str, Mapping[str, Array]]:
        """What came with the release, and the method's own head as it served until now."""
        pair, extras = serving(self.store, self._slots), uploads.read_extras(installed.extras)
        own = pair.stored.head if pair else None
        return {**extras, OWN: own.raw().arrays()} if isinstance(own, Tuned) else extras

    def _accuracies_before(self, data: ClientData) -> dict[str, float]:
        """Those of the pair that serves until now; none if there is none."""
        pair = serving(self.store, self._slots)
        if pair is None:
            return {}
        extractor = Extractor(pair.installed.extractor, pair.installed.manifest)
        names = (metrics.PERSONAL_BEFORE, metrics.PERSONAL_VALIDATION_BEFORE)
        return _accuracies(pair.stored.head, self._features(extractor), data, names)

    def _features(self, extractor: Extractor) -> Callable[[Samples], NDArray[np.float32]]:
        return lambda samples: self._cache.features(extractor, samples.x)

    def _report_rollback(self, release: int) -> None:
        """What was to be said of a release that crashed too often is now that it did."""
        for parcel in self.store.outbox():
            if parcel.report.release == release:
                report = replace(parcel.report, error="crash_loop", metrics={}, head="", extractor="")
                self.store.keep(replace(parcel, report=report))


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
