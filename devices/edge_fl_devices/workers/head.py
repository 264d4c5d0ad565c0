"""The head-only worker: its jobs are to look up and install a release, and to fit, compare, serve and report a head.

A release is proved once its extractor has computed the features of all the device's samples and a head is fitted. If the process dies
three times before that, the release counts as a crash loop, and the previous one is served again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from edge_fl.blob import Blob, describe
from edge_fl.errors import DataError, EdgeFLError, NoLabelsError
from edge_fl.failures import Failure
from edge_fl.heads import Head
from edge_fl.heads.auto import Choice
from edge_fl.heads.class_statistics.prior import PRIOR
from edge_fl.heads.promise import BINS
from edge_fl.wire.egress import STATISTICS, SURVIVALS, of_head
from edge_fl.wire.messages import Report, SumRequest
from edge_fl_devices.agent.assignments import parcel_for
from edge_fl_devices.agent.effects import Fit, Install, Job, Refresh, Train
from edge_fl_devices.agent.events import Event, Failed
from edge_fl_devices.agent.state import LIMITS, AgentLimits
from edge_fl_devices.data import record
from edge_fl_devices.features import drift
from edge_fl_devices.features.client_features import FeatureLoader
from edge_fl_devices.features.onnx_runtime import Runtime
from edge_fl_devices.install import canary
from edge_fl_devices.install.fetch import Sink
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.serving.served_model import installed_extractors, returns, serving
from edge_fl_devices.storage.slots import InstalledRelease, Slots
from edge_fl_devices.storage.store import Store, StoredHead
from edge_fl_devices.workers import comparison, head_updates
from edge_fl_devices.workers.class_statistics import StatisticsOffers
from edge_fl_devices.workers.fits import Fits, FitSettings, Inputs
from edge_fl_devices.workers.head_fitting import Fitter
from edge_fl_devices.workers.releases import PRECISION_LIMITS, DeviceReleases, Mirror, PrecisionLimits
from edge_fl_devices.workers.worker import Material, Worker

log = logging.getLogger(__name__)

Perform = Callable[[Any, Material], Event]
"""Carries out a job of one kind."""


class HeadWorker(Worker):
    """Installs releases and fits heads.

    loader, fitter: as of `Fits`. trust: the signed metadata; by default the first root seen is trusted. verifies: whether the server's
    signatures are verified. runtime, check, precision, mirror: as of `DeviceReleases`. train: trains, on a device that may become a full
    one. data_stamp: the stamp of the device's data as they are now, as of `LoadedFeatures`. share: whether head updates and class
    statistics may be sent. guard: a new model is served only if it is not worse on held-out samples, and drift is measured; off
    in simulated fleets, which measure releases as they are.
    """

    def __init__(
        self,
        device: str,
        store: Store,
        settings: FitSettings,
        *,
        loader: FeatureLoader,
        fitter: Fitter,
        runtime: Callable[[], Runtime],
        trust: Trust | None = None,
        verifies: bool = True,
        check: Callable[[InstalledRelease], None] = canary.require,
        precision: PrecisionLimits = PRECISION_LIMITS,
        mirror: Mirror | None = None,
        train: Perform | None = None,
        data_stamp: Callable[[], str] = str,
        share: bool = True,
        guard: bool = False,
        limits: AgentLimits = LIMITS,
    ) -> None:
        trust = trust or Trust(store.folder / "tuf", trust_on_first_use=True)
        super().__init__(device, store, limits=limits, verifies=trust if verifies else None)
        self._slots, self._offers = Slots(store.folder / "release"), StatisticsOffers(store.folder)
        self._releases = DeviceReleases(store, self._slots, trust, runtime, check, precision, mirror)
        self._fits = Fits(settings, store, self._slots, loader, fitter, self._offers)
        self._data_stamp, self._share, self._guard = data_stamp, share, guard
        self._jobs: dict[type[Job], Perform] = {
            Refresh: self._releases.refresh,
            Install: self._releases.install,
            Fit: self._fit,
        }
        if train:
            self._jobs[Train] = train

    def boot(self) -> int:
        super().boot()
        return self._releases.boot()

    def sink(self, blob: Blob) -> Sink:
        return self._slots.sink(blob)

    def perform(self, job: Job, material: Material) -> Event:
        if perform := self._jobs.get(type(job)):
            return perform(job, material)
        return Failed(Failure.UNSUPPORTED_TIER)

    def offer(self, id: str, request: SumRequest) -> NDArray[np.float64] | None:
        if not self._share:
            return None
        of_head(()).require_sum(request.subject)
        extractor, trained = request.extractor, request.trained
        if request.subject == SURVIVALS:
            return self._offers.give_survivals(id, request.release, request.length, self._data_stamp())
        return self._offers.give(
            id, request.release, request.length, self._data_stamp(), extractor=extractor, trained=trained
        )

    def commit(self, id: str, request: SumRequest, *, leaves: bool) -> None:
        if request.subject == SURVIVALS:
            self._offers.commit_survivals(id)
        else:
            self._offers.commit(id, request.clip, self.device, leaves=leaves)

    def settle(self, id: str, devices: Collection[str]) -> None:
        self._offers.settle(id, added=self.device in devices)

    def _fit(self, job: Fit, material: Material) -> Event:
        """Compute features, fit a head, compare it with the served model, serve it and report."""
        started_s = time.monotonic()
        installed = self._slots.current()
        if installed is None:
            return Failed(Failure.INCOMPLETE, detail="there is no release to fit a head on")
        with record.noting_deaths(self.store.folder):
            try:
                inputs = self._fits.load(installed)
            except DataError as error:
                if self._slots.previous() is None:
                    self._slots.mark_good()  # nothing is labelled yet: starts until then are no crash loop
                if isinstance(error, NoLabelsError) and serving(self.store, self._slots) is None:
                    log.info("%s; %s", error.message, Failure.NO_LABELS.explanation)
                    return Failed(Failure.NO_LABELS, detail=error.message)
                raise
            choice, fit_key = self._fits.fit(inputs)
            compared = comparison.compare(self._fits, choice, inputs)
        if self._guard and compared.worse and not returns(self.store, self._slots):
            self.store.keep_fitted_data(inputs.stamp)
            return self._keep_served_model(inputs)
        report = Report(
            job.assignment.id,
            "head",
            job.boot,
            len(inputs.fitted),
            {
                **comparison.measure(choice, inputs, compared),
                **choice.numbers,
            },
            release=inputs.manifest.release,
            extractor=choice.head.extractor,
            head=choice.head.kind,
            seconds=time.monotonic() - started_s,
            bytes_down=job.bytes_down,
        )
        self._serve(job, report, choice, fit_key, inputs)
        # a refit of the device's own accord has no version, and sends no head update
        blob = self._head_update(choice.head, inputs) if job.assignment.version > 0 else None
        report = replace(report, blob=describe(blob) if blob else None)
        return self.finish(job.assignment, report, blob, of_head(inputs.manifest.heads.uploads))

    def _keep_served_model(self, inputs: Inputs) -> Event:
        """Reject a worse model; a release that led to it is rolled back and not tried again."""
        if inputs.served and inputs.served.installed.extractor != inputs.installed.extractor:
            self._slots.rollback(Failure.WORSE)
        return Failed(Failure.WORSE, detail="the new model is worse on held-out samples")

    def _serve(self, job: Fit, report: Report, choice: Choice, fit_key: str, inputs: Inputs) -> None:
        parcel = parcel_for(job.assignment, report, self.limits)
        stored = StoredHead(
            choice.head, inputs.manifest.release, parcel, fit_key, choice.calibration, inputs.bits
        )
        self.store.keep_head(stored, installed_extractors(self._slots))
        if self._guard and len(inputs.fitted):
            drift.remember_fit(self.store.folder, drift.moments(choice.head.extractor, inputs.fitted.z))
        self._slots.mark_good()
        self.store.keep_fitted_data(inputs.stamp)
        self._prepare_sums(inputs, choice)

    def _head_update(self, head: Head, inputs: Inputs) -> bytes | None:
        if not self._share:
            return None
        train = inputs.features.train
        return head_updates.head_update(inputs.manifest, head, train.z, train.y, inputs.extras)

    def _prepare_sums(self, inputs: Inputs, choice: Choice) -> None:
        """Prepare what the device may add to sums, if the release asks for them."""
        manifest, fitted = inputs.manifest, inputs.fitted
        if not self._share or STATISTICS not in manifest.sums:
            self._offers.withdraw()
            return
        release, sha256, classes = manifest.release, manifest.extractor.sha256, len(manifest.classes)
        try:
            self._offers.prepare(release, sha256, fitted.z, fitted.y, classes, inputs.stamp)
            measured = choice.calibration.is_measured and PRIOR in inputs.extras
            rows = choice.calibration.promise.own if measured else np.empty((0, BINS))
            self._offers.prepare_survivals(release, sha256, rows, inputs.stamp)
        except EdgeFLError as error:
            log.warning("class statistics: %s", error)
