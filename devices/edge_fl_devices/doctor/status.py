"""Status of a device from its folder; can be read while its agent runs."""

from __future__ import annotations

from pathlib import Path

from edge_fl.console.units import size
from edge_fl.errors import InputError
from edge_fl.failures import UNLABELLED, Failure
from edge_fl.files.paths import text
from edge_fl.heads import wording
from edge_fl.modalities import ABOUT
from edge_fl.secure.floors import DEFAULT
from edge_fl.wire.egress import sharing
from edge_fl.wire.endpoint import has_login
from edge_fl_devices.board import usage
from edge_fl_devices.config import remembered
from edge_fl_devices.data import record
from edge_fl_devices.data.first_guesses import FirstGuesses, promise_record
from edge_fl_devices.data.record import DataRecord, named
from edge_fl_devices.features import child_loader, drift
from edge_fl_devices.serving.served_model import ServedModel, device_words, serving
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store

NO_LABELS_YET = "no labelled {} yet, or only one"


def read(folder: Path) -> list[dict[str, object]]:
    """Return rows of {what, value}. Raises InputError when the folder does not exist."""
    if not folder.is_dir():
        raise InputError(f"{text(folder)}: no such folder; expected a device's own folder (--dir)")
    store, slots = Store(folder), Slots(folder / "release")
    served, current, memory = serving(store, slots), slots.current(), store.memory()
    known = record.read(folder)
    kind = current.manifest.input.kind if current else known.report.kind
    samples = ABOUT[kind].samples if current or known.report.samples else "files"  # before the first release
    words = device_words(store, served)
    rows: dict[str, object] = {"folder": text(folder), "serves": "nothing", "head": words.head}
    rows["accuracy"] = words.measured.words
    if forecast := words.measured.forecast:
        rows["forecast"] = forecast.words
    if served:
        head = served.stored.head
        rows["serves"] = f"release {served.stored.release}: {head.kind}, extractor {head.extractor[:12]}"
        classes = served.installed.manifest.classes
        if contradiction := wording.contradiction(served.stored.calibration, classes):
            rows["labels"] = contradiction
        if weakest := wording.weakest_class(served.stored.calibration, classes):
            rows["weakest class"] = weakest
    elif current and known.why == Failure.NO_LABELS and not current.manifest.heads.fleet:
        rows["serves"] = f"nothing: {NO_LABELS_YET.format(samples)}, and the release has no fleet's head"
    guesses = FirstGuesses(folder)
    if first := guesses.totals.words:
        rows["label page"] = first
    if kept := promise_record(guesses.rows.values()).words:
        rows["promise"] = kept
    if current:
        state = "not confirmed yet" if current.pending else "good"
        rows["installed"] = f"release {current.manifest.release} ({current.manifest.method}), {state}"
    rows |= _trust_rows(folder)
    for release, why in slots.blocked.items():
        rows[f"blocked release {release}"] = why
    rows |= _data_rows(known, served, samples)
    if reading := child_loader.read_progress(folder):
        rows["under way"] = str(reading)
    if moved := drift.measured(folder):
        rows["drift"] = f"features moved by {moved:.2f} standard deviations since the fit"
    if (used := usage.read(folder)).day:
        rows[f"used on {used.day}"] = f"{size(used.bytes)} of traffic, {used.cpu_s:.0f} s of processor"
        rows["energy on that day (estimate)"] = f"{used.energy_kj:.2f} kJ"
    rows |= _sum_rows(store)
    rows["reports to send"] = len(store.outbox())
    rows["assignments done"] = len(memory.done)
    rows["personal parts"] = ", ".join(store.runs()) or "none"
    return [{"what": what, "value": value} for what, value in rows.items()]


def _trust_rows(folder: Path) -> dict[str, object]:
    """Why the metadata of the broker were refused last, if people have to do something."""
    from edge_fl_devices.install import trust  # here: python-tuf takes longer to import than all else

    word = trust.last_refusal(folder / "tuf")
    return {word: word.explanation} if word else {}


def _sum_rows(store: Store) -> dict[str, object]:
    """The owner's floors of secure sums, the last sum, and why the device took no part in a later one."""
    config, record = remembered(store.folder), store.sums()
    floors, uploads = (config.sums, config.uploads) if config else (DEFAULT, True)
    certified = config is None or _has_certificate(config.broker.identity)
    rows: dict[str, object] = {"takes part in sums of": str(floors) if uploads else "none: uploads = false"}
    rows |= [sharing(uploads=uploads, minimum=floors.minimum, certified=certified)]
    if record.id:
        rows["last sum"] = record.id
    if record.declined:
        rows["no part in a sum"] = record.declined
    return rows


def _has_certificate(identity: str) -> bool:
    """Whether an identity folder holds a certificate, or a claim that becomes one, and not a login alone."""
    from edge_fl.wire import (
        identity as identities,
    )  # here: its cryptography takes longer to import than all else

    try:
        return bool(identity) and (
            (Path(identity) / identities.CERT_FILE).exists() or not has_login(Path(identity))
        )
    except OSError:  # another account's
        return True


def _data_rows(known: DataRecord, served: ServedModel | None, samples: str) -> dict[str, object]:
    """The last count of the data, and the reason and remedy if it failed. A served head without own labels needs none."""
    data, rows = known.report, dict[str, object]()
    if data.samples:
        rows[samples] = f"{data.samples}: {data.per_class}"[:400]
    lines = {
        "skipped files": "; ".join(
            named(reason, count, data.names.get(reason, ())) for reason, count in sorted(data.skipped.items())
        ),
        "16-bit pictures": data.depth.remark,
        "scenes": "; ".join(data.scene_remarks),
        "quality": "; ".join(record.quality(data.remarks, data.about, data.names)),
        "folders": "; ".join(data.hints),
        f"classes that lost their {samples}": ", ".join(data.disappeared),
    }
    rows |= {what: line for what, line in lines.items() if line}
    if known.why in UNLABELLED and served and not served.stored.parcel.report.samples:
        rows[samples] = f"no label yet, the fleet's head serves without ({known.problem})"
    elif known.why == Failure.NO_LABELS and not served:
        rows[samples] = f"{NO_LABELS_YET.format(samples)} ({known.problem})"
    elif known.why:  # labels that are gone are not "not yet"
        word = Failure.NO_DATA if known.why == Failure.NO_LABELS else Failure.of(known.why)
        found = filter(None, (known.problem, word and word.explanation, "see docs/failure-words.md"))
        rows[word or known.why] = "; ".join(found)
    return rows
