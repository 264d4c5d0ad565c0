"""The files of a device's folder by what a reset does with them, and the lock that keeps the agent out."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_fl.errors import InputError
from edge_fl.files.paths import text
from edge_fl_devices.storage import listed
from edge_fl_devices.storage.store import Store

LEARNED = ("heads", "immediate", "own", "outbox", "release", "features", "drift", "memory.json")
"""Heads, personal parts, pending reports, installed releases and caches."""

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

UNLABELLED = "unlabelled"


@contextmanager
def stopped(folder: Path) -> Iterator[None]:
    """Lock a device's folder while its agent is stopped. Raises InputError if it runs, or if this is no device's folder."""
    if not {"lock", *LEARNED, *RECORDS} & {path.name for path in listed(folder)}:
        raise InputError(f"{text(folder)}: expected the folder of a device that has run (--dir)")
    with Store(folder).owned():
        yield


def give_to_owner(path: Path, folder: Path) -> None:
    """Give a file or folder that root has written to the owner of the device's folder. Raises OSError."""
    if os.geteuid() == 0:
        owner = folder.stat()
        os.chown(path, owner.st_uid, owner.st_gid)
