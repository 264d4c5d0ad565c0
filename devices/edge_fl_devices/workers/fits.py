"""Fit the personal head of a device: its inputs, and a head that follows from them alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from edge_fl.blob import digest
from edge_fl.heads import Tuned
from edge_fl.heads.auto import Choice, HeldOut
from edge_fl.heads.head import Array
from edge_fl.heads.tuned import OWN
from edge_fl.release.manifests import Manifest
from edge_fl_devices.features.client_features import ClientFeatures, FeatureLoader, FeatureSet
from edge_fl_devices.serving.served_model import ServedModel, serving
from edge_fl_devices.storage.slots import InstalledRelease, Slots
from edge_fl_devices.storage.store import Store
from edge_fl_devices.workers import head_updates
from edge_fl_devices.workers.class_statistics import StatisticsOffers
from edge_fl_devices.workers.head_fitting import NOTHING_HELD_OUT, FitData, FitSpec, Fitter


@dataclass(frozen=True)
class FitSettings:
    """Which head to fit, and whether to weight all classes equally and to calibrate it.

    budget_s: for the choice of a kind and for the calibration. cross_validate_below: with fewer groups of images than this a head is
    fitted on all of them.
    """

    kind: str
    balanced: bool = False
    budget_s: float = 60.0
    calibrate: bool = False
    cross_validate_below: int = 0


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs of one fit: the release, its features, and the served model with its own features for the comparison.

    `pooled`: the images are too few to set some apart, so the head is fitted on all of them and measured by cross-validation.
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

    @property
    def manifest(self) -> Manifest:
        return self.installed.manifest

    @property
    def fitted(self) -> FeatureSet:
        """The images that the head is fitted on."""
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
        served = serving(self.store, self.slots)
        releases = [installed]
        if served and served.installed.extractor != installed.extractor:
            releases.append(served.installed)
        loaded = self.loader(releases)
        features = loaded.by_extractor[0]
        assert features is not None  # the loader raises if the images do not fit the first release
        extras = self._read_extras(installed)
        if served and isinstance(served.stored.head, Tuned):
            extras[OWN] = served.stored.head.raw().arrays()
        return Inputs(
            installed=installed,
            features=features,
            fingerprint=loaded.fingerprint,
            stamp=loaded.stamp,
            bits=loaded.bits,
            extras=extras,
            served=served,
            served_features=loaded.by_extractor[-1] if served else None,
            pooled=features.scenes < self.settings.cross_validate_below,
        )

    def fit(self, inputs: Inputs) -> tuple[Choice, str]:
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

    def fit_as_served(self, served: ServedModel, inputs: Inputs, data: FeatureSet) -> Choice:
        """Fit a head on features of the served extractor, for the classes of the new release.

        With another size of the images the split is another one, so the served head may know images that are held out now.
        """
        extras = self._read_extras(served.installed)
        spec = replace(self._spec(served.installed.manifest), classes=len(inputs.manifest.classes))
        return self.fitter(spec, FitData(data.z, data.y, extras, groups=data.groups))

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
        )

    def _read_extras(self, installed: InstalledRelease) -> dict[str, Mapping[str, Array]]:
        """Read the extras of a release, its prior without this device's own part."""
        extras = head_updates.read_extras(installed.extras)
        return self.offers.without_own(extras, installed.manifest.extractor.sha256)


def _fit_key(spec: FitSpec, inputs: Inputs) -> str:
    """A hash of everything that a head follows from."""
    extras = sorted(blob.sha256 for blob in inputs.manifest.extras.values())
    return digest(
        msgspec.json.encode((spec, inputs.pooled)) + "".join([inputs.fingerprint, *extras]).encode()
    )
