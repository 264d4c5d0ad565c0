"""Reset a device to its state after flashing: what a reset does with each file of its folder, and the lock against the agent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edge_fl.errors import InputError
from edge_fl.files.paths import text
from edge_fl.modalities import of_most
from edge_fl_devices.agent.effects import Memory, without_server
from edge_fl_devices.board.installation import settings_file
from edge_fl_devices.config import POOL, DeviceConfig, from_options, remembered
from edge_fl_devices.data import decoding_marker
from edge_fl_devices.storage import listed
from edge_fl_devices.storage.slots import Slots
from edge_fl_devices.storage.store import Store
from edge_fl_maker.labelling import moves as labelling

LEARNED = (
    "heads",
    "immediate",
    "own",
    "outbox",
    "release",
    "features",
    "labelling",
    "drift",
    "measured.json",
    "memory.json",
)
"""Heads, personal parts, pending reports, installed releases and caches, those of the label page included."""

RECORDS = (
    *(
        "answers.json",
        "benchmark.json",
        "data.json",
        "log.jsonl",
        "log.jsonl.1",
        "settings.json",
        "usage.json",
    ),
    "token",
)
"""Measurements, logs, settings of the last run and the token of `device serve`."""

LEDGERS = ("privacy.safetensors", "remote.json", "statistics", "tuf")
"""What was promised to others: epsilon spent, pictures that are in a sum, trusted metadata, and settings from the operator. Only another
identity starts anew.
"""

OF_SERVER = ("tuf", "remote.json", "outbox")
"""What binds a device to one server: the keys that it trusts, settings from the operator, and reports on its assignments."""


@contextmanager
def stopped(folder: Path) -> Iterator[None]:
    """Lock the folder of a stopped device. Raises InputError if agent or label page runs, or if this is no device's folder."""
    if not {"lock", *LEARNED, *RECORDS} & {path.name for path in listed(folder)}:
        raise InputError(f"{text(folder)}: expected the folder of a device that has run (--dir)")
    with Store(folder).owned():
        if decoding_marker.is_held(folder / labelling.FOLDER):
            raise InputError(
                f"{text(folder)}: the label page runs in this folder; expected it to be stopped"
                " (sudo systemctl stop edge-fl edge-fl-label)"
            )
        yield


def give_to_owner(path: Path, folder: Path) -> None:
    """Give a file or folder that root has written to the owner of the device's folder. Raises OSError."""
    if os.geteuid() == 0:
        owner = folder.stat()
        os.chown(path, owner.st_uid, owner.st_gid)


@dataclass(frozen=True)
class ResetPlan:
    """What a reset deletes, in this order; the folder's settings, if it has any."""

    paths: tuple[Path, ...]
    settings: DeviceConfig | None

    def describe(self) -> str:
        """The paths in one line, those in the same folder by their number."""
        by_folder: dict[Path, list[str]] = {}
        for path in self.paths:
            by_folder.setdefault(path.parent, []).append(path.name)
        return "; ".join(
            f"{parent}: {', '.join(names) if len(names) <= 20 else f'{len(names)} files'}"
            for parent, names in by_folder.items()
        )


def plan_reset(folder: Path, *, labels: bool = False, identity: bool = False) -> ResetPlan:
    """What a reset would delete. `labels`: also the samples, with and without labels; `identity`: also identity, ledgers and trust.

    Raises InputError if the settings of the last run are missing and needed.
    """
    settings = remembered(folder) or _flashed(folder)
    names = [*LEARNED, *RECORDS, *(LEDGERS if identity else ())]
    paths = [folder / name for name in names]
    if labels:
        paths += [folder / POOL, *_samples(_required(settings, folder, "--delete-labels"))]
    if identity and (where := _required(settings, folder, "--delete-identity").broker.identity):
        paths += sorted(path for path in Path(where).glob("*") if path.is_file())
    return ResetPlan(tuple(path for path in paths if path.exists()), settings)


def plan_trust_reset(folder: Path) -> ResetPlan:
    """What a device forgets that is to trust another server."""
    paths = (folder / name for name in OF_SERVER)
    return ResetPlan(tuple(path for path in paths if path.exists()), remembered(folder) or _flashed(folder))


def forget_server(folder: Path) -> None:
    """Forget assignments, signatures and failed releases of the server until now. Raises InputError if the agent runs, ArtefactError."""
    store = Store(folder)
    with stopped(folder):
        memory = store.memory()
        reported = (*memory.done, *(stored.parcel.report.id for stored in store.heads()))
        changes = without_server(msgspec.structs.replace(memory, done=reported))
        store.remember(Memory(starts=memory.starts, **changes))
        Slots(folder / "release").unblock()
        for path in (folder / "memory.json", folder / "release" / "state.json"):
            if path.exists():
                give_to_owner(path, folder)


def reset(folder: Path, planned: ResetPlan) -> None:
    """Delete what was planned; may be repeated after an interruption. Raises InputError if the agent runs, OSError."""
    with stopped(folder):
        settings = folder / "settings.json"  # last: a repeated reset needs it
        for path in sorted(planned.paths, key=lambda path: path == settings):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _flashed(folder: Path) -> DeviceConfig | None:
    """The settings that the board was flashed with, for a folder without those of a last run: it was reset before."""
    file = settings_file()
    return from_options(file, {"folder": folder}) if file else None


def _required(settings: DeviceConfig | None, folder: Path, option: str) -> DeviceConfig:
    if settings is None:
        raise InputError(
            f"{text(folder)}: no settings of a last run, so {option} cannot tell what to delete;"
            " expected a folder that was not reset since: start the agent once, or delete them yourself"
        )
    return settings


def _samples(settings: DeviceConfig) -> Iterator[Path]:
    """The files of samples in the class folders of the data folder; those behind a link to a folder are somewhere else, and stay."""
    if settings.reads_folder:
        data = Path(settings.data.removeprefix("folder:"))
        folders = (path for path in data.glob("*") if path.is_dir() and not path.is_symlink())
        found = (path for folder in folders for path in folder.glob("*"))
        yield from sorted(of_most([*found]))
