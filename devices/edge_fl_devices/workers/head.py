"""The head-only worker: verify a release, install it, compute features, fit the personal head, compare, serve and report.

A release is proved once its extractor has computed the features of all the device's images and a head is fitted. If the process dies
three times before that, the release counts as a crash loop, and the previous one is served again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from edge_fl import metrics
from edge_fl.blob import Assembly, Blob, describe, digest
from edge_fl.data import groups as grouping
from edge_fl.errors import DataError, EdgeFLError
from edge_fl.failures import Failure
from edge_fl.heads import Head, Tuned
from edge_fl.heads.auto import Choice, HeldOut
from edge_fl.heads.head import Array
from edge_fl.heads.tuned import OWN
from edge_fl.release.manifest import Manifest, Precision, blobs, paths
from edge_fl.wire.egress import STATISTICS, of_head
from edge_fl.wire.messages import Report, SumRequest
from edge_fl_devices.agent.assignments import parcel_for
from edge_fl_devices.agent.effects import Fit, Install, Job, Refresh, Train
from edge_fl_devices.agent.events import Event, Failed, Installed, Refreshed
from edge_fl_devices.data import record
from edge_fl_devices.features import drift
from edge_fl_devices.features.client_features import ClientFeatures, FeatureLoader, FeatureSet
from edge_fl_devices.features.onnx_runtime import Runtime, require_runnable
from edge_fl_devices.install import canary
from edge_fl_devices.install.fetch import Sink
from edge_fl_devices.install.mirror import Mirror
from edge_fl_devices.install.precision import PRECISION_LIMITS, PrecisionLimits, choose
from edge_fl_devices.install.trust import Trust, wall_clock
from edge_fl_devices.serving.comparison import changed, disagreements, is_significant, is_worse
from edge_fl_devices.serving.served_model import ServedModel, installed_extractors, serving
from edge_fl_devices.storage import slots
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import StoredHead
from edge_fl_devices.workers import head_updates
from edge_fl_devices.workers.head_fitting import NOTHING_HELD_OUT, FitData, FitSpec, Fitter
from edge_fl_devices.workers.statistics import StatisticsOffers
from edge_fl_devices.workers.worker import Material, Worker

log = logging.getLogger(__name__)

BEFORE = (metrics.PERSONAL_BEFORE, metrics.PERSONAL_VALIDATION_BEFORE)
AFTER = (metrics.PERSONAL_AFTER, metrics.PERSONAL_VALIDATION_AFTER)


@dataclass(frozen=True, eq=False)
class _Inputs:
    """Inputs of one fit: the release, its features, and the served model with its own features for the comparison.

    `pooled`: the images are too few to set some apart, so the head is fitted on all of them and measured by cross-validation.
    """

    manifest: Manifest
    features: ClientFeatures
    fingerprint: str
    stamp: str
    bits: int
    extras: Mapping[str, Mapping[str, Array]]
    served: ServedModel | None
    served_features: ClientFeatures | None
    pooled: bool

    @property
    def fitted(self) -> FeatureSet:
        """The images that the head is fitted on."""
        return self.features.pool if self.pooled else self.features.train


@dataclass(frozen=True)
class _Comparison:
    """Images that only the served model classifies correctly, those that only the new one does, and whether the new one is worse.

    `old` is the head that was compared with the new one, unless by cross-validation.
    """

    lost: int = 0
    gained: int = 0
    worse: bool = False
    old: Head | None = None


@dataclass(eq=False)
class HeadWorker(Worker):
    """Installs releases and fits heads.

    kind, balanced, budget_s: which head to fit. calibrate: whether to calibrate it. cross_validate_below: with fewer groups of images than
    this a head is fitted on all of them. share: whether head updates and class statistics may be sent. guard: a new model is served only
    if it is not worse than the old one on held-out images, and drift is measured; off in simulated fleets, which measure releases as they
    are. root: the trusted root of the signed metadata; None trusts the first one seen. check: the canary. full: trains, if not demoted.
    data_stamp: the stamp of the device's data as they are now, as of `LoadedFeatures`.
    """

    _: KW_ONLY
    loader: FeatureLoader
    fitter: Fitter
    runtime: Runtime
    kind: str
    balanced: bool = False
    budget_s: float = 60.0
    calibrate: bool = False
    cross_validate_below: int = 0
    share: bool = True
    guard: bool = False
    root: bytes | None = None
    check: Callable[[slots.Installed], None] = canary.require
    clock: Callable[[], datetime] = wall_clock
    precision: PrecisionLimits = PRECISION_LIMITS
    mirror: Mirror | None = None
    full: Worker | None = None
    data_stamp: Callable[[], str] = str
    _slots: Slots = field(init=False)
    trust: Trust = field(init=False)
    _offers: StatisticsOffers = field(init=False)

    def __post_init__(self) -> None:
        folder = self.store.folder
        self._offers = StatisticsOffers(folder)
        self._slots = Slots(folder / "release")
        self.trust = Trust(folder / "tuf", self.root, trust_on_first_use=self.root is None, clock=self.clock)
        self.verifies = self.trust

    def boot(self) -> int:
        super().boot()
        blocked = self._slots.blocked
        self._slots.boot()
        for release in self._slots.blocked.keys() - blocked.keys():
            self._report_crash_loop(release)
        served = serving(self.store, self._slots)
        return served.stored.release if served else 0

    def sink(self, blob: Blob, *, keep: bool) -> Sink:
        return self._slots.sink(blob) if keep else Assembly(blob)

    def perform(self, job: Job, material: Material) -> Event:
        match job:
            case Refresh() if isinstance(material, Mapping):
                return self._refresh(job, material)
            case Install():
                with record.noting_deaths(self.store.folder):
                    self._slots.install(job.manifest, check=self.check)
                return Installed(job.manifest.release)
            case Fit():
                with record.noting_deaths(self.store.folder):
                    return self._fit(job)
            case Train() if self.full:
                return self.full.perform(job, material)
        return Failed(Failure.UNSUPPORTED_TIER)

    def offer(self, id: str, request: SumRequest) -> NDArray[np.float64] | None:
        if not self.share:
            return None
        of_head(()).require_sum(request.subject)
        return self._offers.give(id, request.release, request.length, self.data_stamp())

    def commit(self, id: str, request: SumRequest, *, leaves: bool) -> None:
        self._offers.commit(id, request.clip, self.device, leaves=leaves)

    def settle(self, id: str, devices: Collection[str]) -> None:
        self._offers.settle(id, added=self.device in devices)

    # receive a release

    def _refresh(self, job: Refresh, files: Mapping[str, bytes]) -> Event:
        """Verify the signed metadata and prepare the download of the release."""
        manifests = self.trust.refresh(files.__getitem__)
        manifest = next((signed for signed in manifests if signed.release == job.release), None)
        if manifest is None:
            known = ", ".join(str(signed.release) for signed in manifests)
            return Failed(
                Failure.MISSING, detail=f"release {job.release} is not among the signed ones ({known})"
            )
        manifest = manifest.chosen(self._choose_precision(manifest))
        current = self._slots.current()
        if current and current.manifest == manifest:
            return Refreshed(manifest, installed=True)
        require_runnable(manifest, self.runtime)
        self._slots.prepare(manifest)
        transferred = self._fetch_from_mirror(manifest)
        missing = tuple(blob for blob in blobs(manifest) if self._slots.sink(blob).missing)
        return Refreshed(manifest, missing, bytes=transferred)

    def _choose_precision(self, manifest: Manifest) -> Precision:
        served = serving(self.store, self._slots)
        if served is None:
            return choose(manifest, self.precision, None, 0.0)
        measured_ms = served.stored.parcel.report.metrics.get(metrics.LATENCY_AFTER, 0.0)
        return choose(manifest, self.precision, served.installed.manifest, measured_ms)

    def _fetch_from_mirror(self, manifest: Manifest) -> int:
        """Fetch what the owner's web server, if any, has of the release; return the bytes transferred."""
        if self.mirror is None:
            return 0
        files = paths(manifest).items()
        return sum(self.mirror.fetch(path, blob, self._slots.sink(blob)) for path, blob in files)

    # fit a head

    def _fit(self, job: Fit) -> Event:
        """Compute features, fit a head, compare it with the served model, serve it and report."""
        started_s = time.monotonic()
        installed = self._slots.current()
        if installed is None:
            return Failed(Failure.INCOMPLETE, detail="there is no release to fit a head on")
        try:
            inputs = self._load_inputs(installed)
        except DataError:
            if self._slots.previous() is None:
                self._slots.mark_good()  # nothing is labelled yet: starts until then are no crash loop
            raise
        choice, fit_key = self._fit_head(inputs)
        compared = self._compare(choice, inputs)
        if self.guard and compared.worse:
            self.store.keep_fitted_data(inputs.stamp)
            return self._keep_served_model(installed, inputs)
        report = Report(
            job.assignment.id,
            "head",
            job.boot,
            len(inputs.fitted),
            {**_measure(choice, inputs, compared), **choice.numbers},
            release=inputs.manifest.release,
            extractor=choice.head.extractor,
            head=choice.head.kind,
            seconds=time.monotonic() - started_s,
            bytes_down=job.bytes_down,
        )
        parcel = parcel_for(job.assignment, report, self.limits)
        stored = StoredHead(
            choice.head, inputs.manifest.release, parcel, fit_key, choice.calibration, inputs.bits
        )
        self._serve(stored, inputs)
        self.store.keep_fitted_data(inputs.stamp)
        self._prepare_statistics(inputs)
        # a refit of the device's own accord has no version, and sends no head update
        blob = self._head_update(choice.head, inputs) if job.assignment.version > 0 else None
        report = replace(report, blob=describe(blob) if blob else None)
        return self.finish(job.assignment, report, blob, of_head(inputs.manifest.heads.uploads))

    def _load_inputs(self, installed: slots.Installed) -> _Inputs:
        """Compute the device's features with the installed extractor and with the one served until now."""
        served = serving(self.store, self._slots)
        releases = [installed]
        if served and served.installed.extractor != installed.extractor:
            releases.append(served.installed)
        loaded = self.loader(releases)
        features = loaded.by_extractor[0]
        assert features is not None  # the loader raises if the images do not fit the first release
        extras = self._read_extras(installed)
        if served and isinstance(served.stored.head, Tuned):
            extras[OWN] = served.stored.head.raw().arrays()
        return _Inputs(
            manifest=installed.manifest,
            features=features,
            fingerprint=loaded.fingerprint,
            stamp=loaded.stamp,
            bits=loaded.bits,
            extras=extras,
            served=served,
            served_features=loaded.by_extractor[-1] if served else None,
            pooled=features.scenes < self.cross_validate_below,
        )

    def _fit_head(self, inputs: _Inputs) -> tuple[Choice, str]:
        """Return the head and the key of its fit. A head with the same key is reused: it follows from the same inputs."""
        manifest, fitted = inputs.manifest, inputs.fitted
        spec = self._spec(manifest)
        fit_key = _fit_key(spec, inputs)
        if known := self.store.head(manifest.extractor.sha256):
            # a head for fewer classes stays as long as there is no image of the appended ones
            narrower = replace(spec, classes=min(known.head.classes, spec.classes))
            if known.fit_key in (fit_key, _fit_key(narrower, inputs)):
                return Choice(known.head, calibration=known.calibration), known.fit_key
        validation = inputs.features.validation
        held = NOTHING_HELD_OUT if inputs.pooled else HeldOut(validation.z, validation.y, validation.groups)
        return self.fitter(spec, FitData(fitted.z, fitted.y, inputs.extras, held, fitted.groups)), fit_key

    def _spec(self, manifest: Manifest) -> FitSpec:
        return FitSpec(
            self.kind,
            len(manifest.classes),
            manifest.unit_norm,
            manifest.extractor.sha256,
            seed=manifest.round,
            balanced=self.balanced,
            plan=manifest.heads,
            budget_s=self.budget_s,
            calibrate=self.calibrate or self.cross_validate_below > 0,
        )

    def _compare(self, choice: Choice, inputs: _Inputs) -> _Comparison:
        """Compare the new model with the served one on images that neither was fitted on."""
        served, features = inputs.served, inputs.served_features
        if served is None or features is None:
            return _Comparison()
        if inputs.pooled:
            lost, gained = self._compare_out_of_fold(choice, inputs, served, features.pool)
            return _Comparison(lost, gained, is_significant(lost, gained))
        old, new = served.stored.head, choice.head
        if served.installed.manifest.input != inputs.manifest.input:
            old = self._fit_on(served, inputs, features.train).head
        lost, gained = disagreements(old, features.test, new, inputs.features.test)
        return _Comparison(lost, gained, is_worse(old, features, new, inputs.features), old)

    def _compare_out_of_fold(
        self, choice: Choice, inputs: _Inputs, served: ServedModel, old: FeatureSet
    ) -> tuple[int, int]:
        """Cross-validate a head as on the served release too, on the same images and folds; return losses and gains."""
        before, now = served.installed.manifest, inputs.manifest
        same = (before.extractor, before.extras, before.heads) == (now.extractor, now.extras, now.heads)
        if same or len(old) != len(inputs.fitted):
            return 0, 0
        right, right_now = self._fit_on(served, inputs, old).calibration.right, choice.calibration.right
        if len(right) != len(right_now):
            return 0, 0
        return changed(right, right_now, choice.calibration.groups)

    def _fit_on(self, served: ServedModel, inputs: _Inputs, data: FeatureSet) -> Choice:
        """Fit a head on features of the served extractor, for the classes of the new release.

        With another size of the images the split is another one, so the served head may know images that are held out now.
        """
        extras = self._read_extras(served.installed)
        spec = replace(self._spec(served.installed.manifest), classes=len(inputs.manifest.classes))
        return self.fitter(spec, FitData(data.z, data.y, extras, groups=data.groups))

    def _keep_served_model(self, installed: slots.Installed, inputs: _Inputs) -> Event:
        """Reject a worse model; a release that led to it is rolled back and not tried again."""
        if inputs.served and inputs.served.installed.extractor != installed.extractor:
            self._slots.rollback(Failure.WORSE)
        return Failed(Failure.WORSE, detail="the new model is worse on held-out images")

    def _serve(self, stored: StoredHead, inputs: _Inputs) -> None:
        self.store.keep_head(stored, installed_extractors(self._slots))
        if self.guard:
            moments = drift.moments(stored.head.extractor, inputs.fitted.z)
            drift.remember_fit(self.store.folder, moments)
        self._slots.mark_good()

    def _head_update(self, head: Head, inputs: _Inputs) -> bytes | None:
        if not self.share:
            return None
        train = inputs.features.train
        return head_updates.head_update(inputs.manifest, head, train.z, train.y, inputs.extras)

    def _prepare_statistics(self, inputs: _Inputs) -> None:
        """Prepare what the device may add to a sum, if the release asks for it."""
        manifest, fitted = inputs.manifest, inputs.fitted
        if not self.share or STATISTICS not in (manifest.sums or ()):
            self._offers.withdraw()
            return
        release, sha256, classes = manifest.release, manifest.extractor.sha256, len(manifest.classes)
        try:
            self._offers.prepare(release, sha256, fitted.z, fitted.y, classes, inputs.stamp)
        except EdgeFLError as error:
            log.warning("class statistics: %s", error)

    def _read_extras(self, installed: slots.Installed) -> dict[str, Mapping[str, Array]]:
        """Read the extras of a release, its prior without this device's own part."""
        extras = head_updates.read_extras(installed.extras)
        return self._offers.without_own(extras, installed.manifest.extractor.sha256)

    def _report_crash_loop(self, release: int) -> None:
        """Turn the unsent reports on a release into reports of its crash loop."""
        for parcel in self.store.outbox():
            if parcel.report.release == release:
                report = replace(parcel.report, error=Failure.CRASH_LOOP, metrics={}, head="", extractor="")
                self.store.keep(replace(parcel, report=report))


def _fit_key(spec: FitSpec, inputs: _Inputs) -> str:
    """A hash of everything that a head follows from."""
    extras = sorted(blob.sha256 for blob in inputs.manifest.extras.values())
    return digest(
        msgspec.json.encode((spec, inputs.pooled)) + "".join([inputs.fingerprint, *extras]).encode()
    )


def _measure(choice: Choice, inputs: _Inputs, compared: _Comparison) -> dict[str, float]:
    """Numbers of groups, and accuracies and latency of the new model and, where comparable, of the served one."""
    features, old, old_features = inputs.features, inputs.served, inputs.served_features
    calibrations = (old.stored.calibration if old else None, choice.calibration)
    sizes = {
        metrics.TEST_SAMPLES: float(choice.calibration.scenes if inputs.pooled else features.test.scenes),
        metrics.VALIDATION_SAMPLES: float(0 if inputs.pooled else features.validation.scenes),
    }
    numbers = {**sizes, metrics.LATENCY_AFTER: features.latency_ms}
    if inputs.pooled:
        numbers |= {
            name: calibration.accuracy
            for name, calibration in zip((BEFORE[0], AFTER[0]), calibrations, strict=True)
            if calibration and len(calibration.right)
        }
    else:
        numbers |= _accuracies(choice.head, features, AFTER)
    if old is None or old_features is None:
        return numbers
    if compared.old:
        numbers |= _accuracies(compared.old, old_features, BEFORE)
    return {
        **numbers,
        metrics.LATENCY_BEFORE: old_features.latency_ms,
        metrics.TEST_LOST: float(compared.lost),
        metrics.TEST_GAINED: float(compared.gained),
    }


def _accuracies(head: Head, features: ClientFeatures, names: tuple[str, str]) -> dict[str, float]:
    """Accuracies on the test and validation sets that have samples."""
    sets = zip(names, (features.test, features.validation), strict=True)
    return {
        name: grouping.mean(head.predict(data.z) == data.y, data.groups) for name, data in sets if len(data)
    }
