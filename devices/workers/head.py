"""What a head-only device does with a release: believe its metadata, install it, compute features, fit and judge the personal head.

A release has proved itself when its extractor has computed the features of all the device's own images and a head is fitted; a
process that dies three times before that is a crash loop, and the release before it serves again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

import msgspec
from msgspec.structs import replace

from devices.agent.effects import Fit, Install, Job, Refresh
from devices.agent.events import Event, Failed, Installed, Refreshed
from devices.agent.state import LIMITS, AgentLimits
from devices.features import drift
from devices.features.client_features import ClientFeatures, FeatureLoader
from devices.features.onnx_runtime import Runtime, require_runnable
from devices.install import canary
from devices.install.fetch import Sink
from devices.install.mirror import Mirror
from devices.install.precision import PRECISION_LIMITS, PrecisionLimits, choose
from devices.install.trust import Trust, wall_clock
from devices.serving.comparison import changes, is_worse
from devices.serving.served_model import ServedModel, installed_extractors, serving
from devices.storage import slots as artefact
from devices.storage.slots import Slots
from devices.storage.store import Store, StoredHead
from devices.workers import head_updates
from devices.workers.worker import Worker
from devices.workers.head_fitting import FitData, FitSpec, Fitter
from edge_fl import metrics
from edge_fl.heads import Head, Tuned
from edge_fl.heads.auto import Choice, HeldOut
from edge_fl.heads.head import Array, Extras
from edge_fl.heads.tuned import OWN
from edge_fl.release.manifest import Manifest, Precision, blobs, paths
from edge_fl.wire.blob import Assembly, Blob, describe, digest
from edge_fl.wire.egress import of_head
from edge_fl.wire.messages import Report

BEFORE = (metrics.PERSONAL_BEFORE, metrics.PERSONAL_VALIDATION_BEFORE)
AFTER = (metrics.PERSONAL_AFTER, metrics.PERSONAL_VALIDATION_AFTER)


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
    """Installs releases and fits heads of one `kind` on the device's data; with `share` off, only numbers are ever sent back.

    With `guard` a new pair serves only if it is not worse than the old one on the held-out images; a simulated fleet, which measures
    releases as they are, does without.
    """

    def __init__(
        self,
        device: str,
        store: Store,
        loader: FeatureLoader,
        kind: str,
        fitter: Fitter,
        runtime: Runtime,
        *,
        root: bytes | None = None,
        share: bool = True,
        balanced: bool = False,
        budget_s: float = 60.0,
        guard: bool = False,
        check: Callable[[artefact.Installed], None] = canary.require,
        clock: Callable[[], datetime] = wall_clock,
        precision: PrecisionLimits = PRECISION_LIMITS,
        mirror: Mirror | None = None,
        limits: AgentLimits = LIMITS,
    ) -> None:
        super().__init__(device, store, limits)
        self._mirror = mirror
        self._loader, self._kind, self._fitter, self._check = loader, kind, fitter, check
        self._runtime, self._precision = runtime, precision
        self._share, self._balanced, self._guard, self._budget_s = share, balanced, guard, budget_s
        self._slots = Slots(store.folder / "release")
        self._trust = Trust(store.folder / "tuf", root, trust_on_first_use=root is None, clock=clock)
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
        manifest = manifest.chosen(self._choose(manifest))
        current = self._slots.current()
        if current and current.manifest == manifest:
            return Refreshed(manifest, installed=True)
        require_runnable(manifest, self._runtime)
        self._slots.prepare(manifest)
        came_bytes = self._ask_mirror(manifest)
        missing = tuple(blob for blob in blobs(manifest) if self._slots.missing(blob))
        return Refreshed(manifest, missing, bytes=came_bytes)

    def _ask_mirror(self, manifest: Manifest) -> int:
        """Lets a web server, where the owner named one, bring what it can -> bytes that came."""
        if self._mirror is None:
            return 0
        wanted = paths(manifest).items()
        return sum(self._mirror.fill(path, blob, _KeptChunks(self._slots, blob)) for path, blob in wanted)

    def _choose(self, manifest: Manifest) -> Precision:
        pair = serving(self.store, self._slots)
        if pair is None:
            return choose(manifest, self._precision, None, 0.0)
        measured_ms = pair.stored.parcel.report.metrics.get(metrics.LATENCY_AFTER, 0.0)
        return choose(manifest, self._precision, pair.installed.manifest, measured_ms)

    def _install(self, job: Install, _: object) -> Event:
        self._slots.install(job.manifest, check=self._check)
        return Installed(job.manifest.release)

    def _fit(self, job: Fit, _: object) -> Event:
        started_s = time.monotonic()
        installed = self._slots.current()
        if installed is None:
            return Failed("incomplete", detail="there is no release to fit a head on")
        manifest, pair = installed.manifest, serving(self.store, self._slots)
        (features, served), fingerprint = self._features(installed, pair)
        extras = self._extras(installed)
        choice, fit_key = self._head(manifest, features, fingerprint, extras)
        head = choice.head
        if self._guard and pair and served and is_worse(pair.stored.head, served, head, features):
            return self._keep_old(installed, pair)
        before = _before(pair.stored.head, served, head, features) if pair and served else {}
        after = {**_accuracies(head, features, AFTER), metrics.LATENCY_AFTER: features.latency_ms}
        sizes = {
            metrics.TEST_SAMPLES: float(len(features.test)),
            metrics.VALIDATION_SAMPLES: float(len(features.validation)),
        }
        report = Report(
            job.assignment.id,
            "head",
            job.boot,
            len(features.train),
            {**sizes, **before, **after, **choice.numbers},
            release=manifest.release,
            extractor=head.extractor,
            head=head.kind,
            seconds=time.monotonic() - started_s,
            bytes_down=job.bytes_down,
        )
        stored = StoredHead(head, manifest.release, self.parcel(job.assignment, report), fit_key)
        self.store.keep_head(stored, installed_extractors(self._slots))
        if self._guard:
            drift.remember_fit(self.store.folder, drift.moments(head.extractor, features.train.z))
        self._slots.mark_good()
        # a device that fits anew on its own account sends numbers only
        asked = self._share and job.assignment.version > 0
        blob = (
            head_updates.parts_for(manifest, head, features.train.z, features.train.y, extras) if asked else None
        )
        report = replace(report, blob=describe(blob) if blob else None)
        return self.finish(job.assignment, report, blob, of_head(manifest.heads.uploads))

    def _head(
        self, manifest: Manifest, features: ClientFeatures, fingerprint: str, extras: Extras
    ) -> tuple[Choice, str]:
        """The head for these features, and the key of its fit; fitted only when something that it follows from is new."""
        spec = FitSpec(
            self._kind,
            len(manifest.classes),
            manifest.unit_norm,
            manifest.extractor.sha256,
            seed=manifest.round,
            balanced=self._balanced,
            plan=manifest.heads,
            budget_s=self._budget_s,
        )
        fit_key = digest(msgspec.json.encode(spec) + fingerprint.encode())
        known = self.store.head(manifest.extractor.sha256)
        if known and known.fit_key == fit_key:
            return Choice(known.head), fit_key
        held = HeldOut(features.validation.z, features.validation.y)
        return self._fitter(spec, FitData(features.train.z, features.train.y, extras, held)), fit_key

    def _keep_old(self, installed: artefact.Installed, pair: ServedModel) -> Event:
        """The new pair is worse on the held-out images: the old one serves on, and a release that brought it is not tried again."""
        if pair.installed.extractor != installed.extractor:
            self._slots.rollback("worse")
        return Failed("worse", final=True, detail="the new pair is worse on held-out images")

    def _features(
        self, installed: artefact.Installed, pair: ServedModel | None
    ) -> tuple[tuple[ClientFeatures, ClientFeatures | None], str]:
        """The device's data through the extractor to fit on and through the one that serves until now."""
        others = [pair.installed] if pair and pair.installed.extractor != installed.extractor else []
        loaded = self._loader([installed, *others])
        features = loaded.by_extractor[0]
        assert features  # `FeatureLoader` raises when the first does not fit
        return (features, loaded.by_extractor[-1] if pair else None), loaded.fingerprint

    def _extras(self, installed: artefact.Installed) -> dict[str, Mapping[str, Array]]:
        """What came with the release, and the method's own head as it served until now."""
        pair, extras = serving(self.store, self._slots), head_updates.read_extras(installed.extras)
        own = pair.stored.head if pair else None
        return {**extras, OWN: own.raw().arrays()} if isinstance(own, Tuned) else extras

    def _report_rollback(self, release: int) -> None:
        """What was to be said of a release that crashed too often is now that it did."""
        for parcel in self.store.outbox():
            if parcel.report.release == release:
                report = replace(parcel.report, error="crash_loop", metrics={}, head="", extractor="")
                self.store.keep(replace(parcel, report=report))


def _before(old: Head, served: ClientFeatures, head: Head, features: ClientFeatures) -> dict[str, float]:
    """How the old pair does, and what the new one loses and gains against it, image by image."""
    lost, gained = changes(old, served.test, head, features.test)
    return {
        **_accuracies(old, served, BEFORE),
        metrics.LATENCY_BEFORE: served.latency_ms,
        metrics.TEST_LOST: float(lost),
        metrics.TEST_GAINED: float(gained),
    }


def _accuracies(head: Head, features: ClientFeatures, names: tuple[str, str]) -> dict[str, float]:
    """Accuracy on test and validation, under these names, where there are samples."""
    sets = zip(names, (features.test, features.validation), strict=True)
    return {name: metrics.accuracy(head.predict(found.z), found.y) for name, found in sets if len(found)}
