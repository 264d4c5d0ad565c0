"""The served model: an extractor and the head fitted on it.

Heads are stored per extractor, in a file named after the extractor's hash. The installed release is served once a head is fitted on it;
until then, and after a rollback, the previous release with its own head is served. A later release of the same extractor may append
classes: the head for fewer classes is served with it.

Predictions use the immediate head, which `edge-fl device serve` fits at once after a label, until the agent has fitted its own head anew.
Comparisons, reports and the guard of the agent use its own heads only.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_fl import metrics
from edge_fl.heads import wording
from edge_fl.heads.wording import DeviceWords, MeasuredAccuracy
from edge_fl_devices.storage.slots import InstalledRelease, Slots
from edge_fl_devices.storage.store import ImmediateHead, Store, StoredHead


@dataclass(frozen=True, eq=False)
class ServedModel:
    """An installed release with its head."""

    installed: InstalledRelease
    stored: StoredHead


def serving(store: Store, slots: Slots) -> ServedModel | None:
    """Return the model to predict with; None before the first head.

    A pending release waits for its fit, even if the head of an earlier one with the same extractor is known. One that the device has
    served before is served at once with the head of that time.
    """
    return _first(store, slots, before=not returns(store, slots))


def replaced(store: Store, slots: Slots) -> ServedModel | None:
    """Return the model that a fit on the current release replaces, and is compared with: while that is pending, the one before it."""
    return _first(store, slots, before=True)


def returns(store: Store, slots: Slots) -> bool:
    """Whether the pending release is one that the device has served before, as after a roll-back."""
    current = slots.current()
    if current is None or not current.pending:
        return False
    known = store.head(current.manifest.extractor.sha256)
    return known is not None and known.release == current.manifest.release


def _first(store: Store, slots: Slots, *, before: bool) -> ServedModel | None:
    """The first release with a head; `before`: of a pending one and the one before it, the latter first."""
    current, previous = slots.current(), slots.previous()
    for installed in (previous, current) if before and current and current.pending else (current, previous):
        stored = store.head(installed.manifest.extractor.sha256) if installed else None
        # a head for more classes than the release names belongs to a later release of the same extractor
        if installed and stored and stored.head.classes <= len(installed.manifest.classes):
            return ServedModel(installed, stored)
    return None


def predicting(store: Store, slots: Slots) -> tuple[InstalledRelease, StoredHead | ImmediateHead] | None:
    """Return the release and the head to predict with: the served one, or the immediate head of the same extractor if that is newer.

    Before the agent's first head it is that of the current release; None without any head.
    """
    served = serving(store, slots)
    if (installed := served.installed if served else slots.current()) is None:
        return None
    newer = store.immediate_head(installed.manifest.extractor.sha256)
    if newer and newer.head.classes <= len(installed.manifest.classes):
        return installed, newer
    return (installed, served.stored) if served else None


def measured(fitted: StoredHead | ImmediateHead) -> MeasuredAccuracy:
    """The accuracy of a head: as in the report on its fit, or from its calibration for one that was not reported."""
    if isinstance(fitted, StoredHead) and metrics.PERSONAL_AFTER in fitted.parcel.report.metrics:
        return MeasuredAccuracy.of_report(fitted.parcel.report.metrics)
    return MeasuredAccuracy.of_calibration(fitted.calibration)


def device_words(store: Store, served: ServedModel | None) -> DeviceWords:
    """What the device predicts with, and its accuracy, in the words of the fleet's list and the dashboard."""
    if (own := store.measured()) is not None:
        return DeviceWords.of_report("", 0, own, full=True)
    if served is None:
        return DeviceWords.of_report("", 0, None)
    return DeviceWords(head_words(served.stored), measured(served.stored))


def head_words(fitted: StoredHead | ImmediateHead) -> str:
    """What a head is: the fleet's, with how far it follows from own labels, or its kind."""
    found = fitted.calibration
    labels = fitted.parcel.report.samples if isinstance(fitted, StoredHead) else len(found.right)
    return wording.head_words(fitted.head.kind, labels, found.own_weight if len(found.fleet) else 0.0)


def installed_extractors(slots: Slots) -> set[str]:
    """Return the hashes of the installed extractors, whose heads are kept."""
    return {release.manifest.extractor.sha256 for release in (slots.current(), slots.previous()) if release}
