"""Examine the labels of a device (`edge_fl.heads.label_doctor`), for `edge-fl device doctor --labels` and the label page."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from edge_fl import heads
from edge_fl.data.grouping import Groups
from edge_fl.errors import InputError
from edge_fl.files.paths import text
from edge_fl.heads import label_doctor
from edge_fl.heads.label_doctor import Examination
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import location
from edge_fl_devices.data.file_index import near_duplicates
from edge_fl_devices.data.record import named
from edge_fl_devices.data.right_labels import RightLabels
from edge_fl_devices.features.feature_rows import file_key
from edge_fl_devices.storage.slots import InstalledRelease, Slots
from edge_fl_devices.workers import head_updates
from edge_fl_devices.workers.class_statistics import StatisticsOffers
from edge_fl_devices.workers.head_fitting import FitData, FitSpec, training_set


class NoReleaseError(InputError):
    """No release is installed yet: not a fault."""


def examine(
    spec: FitSpec,
    data: FitData,
    files: NDArray[np.int64],
    names: Sequence[str],
    classes: Sequence[str],
    duplicates: Groups,
) -> Examination:
    """Examine labelled samples in any order; the others are as of `label_doctor.examine`. Without samples nothing is found."""
    if not len(data.y):  # without a fleet's head either, there is no training set
        return Examination([], [], 0, 0.0)
    order = np.array(heads.canonical_order(data.z, data.y), np.int64)
    taken = training_set(spec, dataclasses.replace(data, unlabelled=None, importance=np.empty(0)))
    alike = duplicates[order] if len(duplicates) else duplicates
    return label_doctor.examine(taken, files[order], names, classes, alike)


def of_device(config: DeviceConfig) -> tuple[Examination, list[str], list[str]]:
    """Examine the labels of a device -> what is found, the names of the files, of arrays the numbers of samples, and the classes.

    It reads the data as the agent does, with a copy of what that keeps of them, so nothing on the device changes and the agent may run.
    Labels that a person called right are left out. Raises NoReleaseError before the first release, DataError for unusable data.
    """
    from edge_fl_devices.data import load  # here, as below: the label page's child reads no samples
    from edge_fl_devices.data.sources import IN_TWO
    from edge_fl_devices.features.local_loader import LocalFeatureLoader

    folder = Path(config.folder)
    installed = Slots(folder / "release").current()
    if installed is None:
        raise NoReleaseError(
            "no release is installed yet, by whose features labels are compared", "no label was examined"
        )
    manifest = installed.manifest
    with TemporaryDirectory() as scratch:
        with suppress(shutil.Error, OSError):  # what is missing is computed again
            shutil.copytree(folder / load.FEATURES, Path(scratch) / load.FEATURES)
        reading = load.streamer(replace(config, folder=scratch))
        found, stream = LocalFeatureLoader(reading, Path(scratch), threads=0).labelled(installed)
    keys = [each.file or b"%d" % number for number, each in enumerate(stream.facts)]
    unique = list(dict.fromkeys(keys))
    numbers = {key: number for number, key in enumerate(unique)}
    paths = _paths(config, installed) if config.reads_folder else {}
    names = [
        text(paths[key]) if key in paths else f"sample {number + 1}" for number, key in enumerate(unique)
    ]
    spec = FitSpec(
        "",
        len(manifest.classes),
        manifest.unit_norm,
        manifest.extractor.sha256,
        balanced=config.balanced,
        plan=manifest.heads,
        closed=bool(config.classes),
    )
    extras = StatisticsOffers(folder).without_own(
        head_updates.read_extras(installed.extras), manifest.extractor.sha256
    )
    files = np.array([numbers[key] for key in keys], np.int64)
    alike = near_duplicates(stream.facts) if manifest.input.kind == "picture" else np.empty(0, np.int64)
    examined = examine(
        spec, FitData(found.z, found.y, extras, groups=found.groups), files, names, manifest.classes, alike
    )
    right, given = RightLabels(folder), found.y[np.unique(files, return_index=True)[1]]
    left = [
        each
        for each in examined.labels
        if (unique[each.file], manifest.classes[given[each.file]]) not in right
    ]
    copies = stream.report.skipped.get(IN_TWO, 0)
    remarks = [named(IN_TWO, copies, stream.report.names.get(IN_TWO, ()))] if copies else []
    examined = replace(examined, labels=left, remarks=[*remarks, *examined.remarks])
    return examined, names, list(manifest.classes)


def _paths(config: DeviceConfig, installed: InstalledRelease) -> dict[bytes, Path]:
    """The labelled files by key, relative to the folder of the data."""
    from edge_fl_devices.data import load, sources
    from edge_fl_devices.data.spec import DataSpec

    manifest = installed.manifest
    spec = load.with_settings(DataSpec(tuple(manifest.classes), manifest.input), config)
    scanned = sources.scan(location.parsed(config.data)[1], spec)
    found = dict[bytes, Path]()
    for path, _ in scanned.files:
        with suppress(OSError):  # deleted at this moment
            found[file_key(path)] = path.relative_to(scanned.root)
    return found
