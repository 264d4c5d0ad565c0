"""Fit the personal head of a device: its inputs, and a head that follows from them alone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from edge_fl import heads
from edge_fl.blob import digest
from edge_fl.errors import ArtefactError, DataError
from edge_fl.heads import Head, Logistic, Tuned
from edge_fl.heads.auto import AUTO, Choice, HeldOut
from edge_fl.heads.head import Array
from edge_fl.heads.tuned import OWN
from edge_fl.release.manifests import Manifest
from edge_fl_devices.features import feature_rows
from edge_fl_devices.features.client_features import (
    ClientFeatures,
    FeatureLoader,
    FeatureSet,
    LoadedFeatures,
    no_labels,
)
from edge_fl_devices.serving.served_model import ServedModel, replaced
from edge_fl_devices.storage.slots import InstalledRelease, Slots
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers import head_updates
from edge_fl_devices.workers.class_statistics import StatisticsOffers
from edge_fl_devices.workers.head_fitting import NOTHING_HELD_OUT, FitData, FitSpec, Fitter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitSettings:
    """Which head to fit, and whether to weight all classes equally and to calibrate it.

    budget_s: for the choice of a kind and for the calibration. cross_validate_below: with fewer groups of samples than this a head is
    fitted on all of them. closed: only classes with labels are predicted.
    """

    kind: str
    balanced: bool = False
    budget_s: float = 60.0
    calibrate: bool = False
    cross_validate_below: int = 0
    closed: bool = False


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs of one fit: the release, its features, and the served model with its own features for the comparison.

    unlabelled float32 [m, d]: features of pictures without a label.
    `pooled`: the samples are too few to set some apart, so the head is fitted on all of them and measured by cross-validation.
    """

    installed: InstalledRelease
    features: ClientFeatures
    fingerprint: str
    stamp: str
    bits: int
    extras: Mapping[str, Mapping[str, Array]]
    served: ServedModel | None
    served_features: ClientFeatures | None
    pooled: bool
    unlabelled: NDArray[np.float32]

    @property
    def manifest(self) -> Manifest:
        return self.installed.manifest

    @property
    def fitted(self) -> FeatureSet:
        """The samples that the head is fitted on."""
        return self.features.pool if self.pooled else self.features.train


@dataclass(frozen=True, eq=False)
class Fits:
    """Fits heads of one device. `offers` take the device's own part out of a prior."""

    settings: FitSettings
    store: Store
    slots: Slots
    loader: FeatureLoader
    fitter: Fitter
    offers: StatisticsOffers

    def load(self, installed: InstalledRelease) -> Inputs:
        """Compute the device's features with the installed extractor and with the one served until now."""
        served = replaced(self.store, self.slots)
        releases = [installed]
        if served and served.installed.extractor != installed.extractor:
            releases.append(served.installed)
        loaded = self._load(releases)
        features = loaded.by_extractor[0]
        assert features is not None  # the loader raises if the samples do not fit the first release
        extras = self._read_extras(installed)
        if served and isinstance(served.stored.head, Tuned):
            extras[OWN] = served.stored.head.raw().arrays()
        manifest = installed.manifest
        unlabelled = feature_rows.of_pool(
            self.store.folder, manifest.extractor.sha256, manifest.feature_dim, loaded.bits
        )
        return Inputs(
            installed=installed,
            features=features,
            fingerprint=loaded.fingerprint,
            stamp=loaded.stamp,
            bits=loaded.bits,
            extras=extras,
            served=served,
            served_features=loaded.by_extractor[-1] if served else None,
            pooled=features.scenes < max(self.settings.cross_validate_below, 1),
            unlabelled=unlabelled,
        )

    def uses_fleet(self, manifest: Manifest) -> bool:
        """Whether the device serves this release's fleet's head, which needs no labels."""
        kind = Logistic.kind if self.settings.kind == AUTO else self.settings.kind
        return heads.uses_fleet(kind, manifest.heads)

    def _load(self, releases: Sequence[InstalledRelease]) -> LoadedFeatures:
        """The features of the labelled samples; where there are none, none, if the first release has a fleet's head. Raises DataError."""
        try:
            return self.loader(releases)
        except DataError as error:
            if not self.uses_fleet(releases[0].manifest):
                raise
            log.info("%s; the fleet's head serves alone", error.message)
            nothing = tuple(no_labels(release.manifest.feature_dim) for release in releases)
            return LoadedFeatures(nothing, "no labelled samples")

    def fleets_head(self, installed: InstalledRelease, classes: int) -> Head | None:
        """The fleet's head of a release alone, for so many classes, as a device without labels serves it; None without one that fits."""
        manifest = installed.manifest
        if not self.uses_fleet(manifest):
            return None
        none = no_labels(manifest.feature_dim).train
        spec = replace(self._spec(manifest), kind=Logistic.kind, calibrate=False, classes=classes)
        try:
            return self.fitter(spec, FitData(none.z, none.y, self._read_extras(installed))).head
        except ArtefactError as error:
            log.warning("release %d: %s", manifest.release, error.message)
            return None

    def fit(self, inputs: Inputs) -> tuple[Choice, str]:
        """Return the head and the key of its fit. A head with the same key is reused: it follows from the same inputs."""
        manifest, fitted = inputs.manifest, inputs.fitted
        spec = self._spec(manifest)
        fit_key = _fit_key(spec, inputs)
        if known := self.store.head(manifest.extractor.sha256):
            # a head for fewer classes stays as long as there is no sample of the appended ones
            narrower = replace(spec, classes=min(known.head.classes, spec.classes))
            if known.fit_key in (fit_key, _fit_key(narrower, inputs)):
                return Choice(known.head, calibration=known.calibration), known.fit_key
        validation = inputs.features.validation
        held = NOTHING_HELD_OUT if inputs.pooled else HeldOut(validation.z, validation.y, validation.groups)
        return self.fitter(
            spec,
            FitData(
                fitted.z, fitted.y, inputs.extras, held, fitted.groups, inputs.unlabelled, fitted.importance
            ),
        ), fit_key

    def fit_as_served(self, served: ServedModel, inputs: Inputs, data: FeatureSet) -> Choice:
        """Fit a head on features of the served extractor, for the classes of the new release.

        With another size of the samples the split is another one, so the served head may know samples that are held out now.
        """
        extras = self._read_extras(served.installed)
        spec = replace(self._spec(served.installed.manifest), classes=len(inputs.manifest.classes))
        return self.fitter(
            spec, FitData(data.z, data.y, extras, groups=data.groups, importance=data.importance)
        )

    def _spec(self, manifest: Manifest) -> FitSpec:
        settings = self.settings
        return FitSpec(
            settings.kind,
            len(manifest.classes),
            manifest.unit_norm,
            manifest.extractor.sha256,
            seed=manifest.round,
            balanced=settings.balanced,
            plan=manifest.heads,
            budget_s=settings.budget_s,
            calibrate=settings.calibrate or settings.cross_validate_below > 0,
            closed=settings.closed,
        )

    def _read_extras(self, installed: InstalledRelease) -> dict[str, Mapping[str, Array]]:
        """Read the extras of a release, its prior without this device's own part."""
        extras = head_updates.read_extras(installed.extras)
        return self.offers.without_own(extras, installed.manifest.extractor.sha256)


def _fit_key(spec: FitSpec, inputs: Inputs) -> str:
    """A hash of everything that a head follows from; of pictures without a label only how many there are, to a factor of two."""
    extras = sorted(blob.sha256 for blob in inputs.manifest.extras.values())
    more = [f"-{len(inputs.unlabelled).bit_length()}"] if len(inputs.unlabelled) else []
    return digest(
        msgspec.json.encode((spec, inputs.pooled)) + "".join([inputs.fingerprint, *extras, *more]).encode()
    )
