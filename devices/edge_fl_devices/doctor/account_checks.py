"""Checks of accounts: whether that of the agent can read and write its pictures and its own folder, tried as that account."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from edge_fl.errors import shortened
from edge_fl.files import paths
from edge_fl_devices.board import installation
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.data import location
from edge_fl_devices.doctor import folder_probe
from edge_fl_devices.doctor.device_checks import DeviceCheck

PROBE_S = 120.0
MAX_NAMED = 3
MAX_ENTRIES = 10_000


@dataclass(frozen=True)
class _Account:
    """The account that the agent runs as; `is_current`: this process runs as it."""

    name: str
    uid: int
    gid: int
    is_current: bool


def accounts(config: DeviceConfig) -> Iterator[DeviceCheck]:
    """Check as root what the agent's account can use, the owner of the device's folder; otherwise what this account can."""
    folder = Path(config.folder)
    account = _account(folder)
    if folder.is_dir() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        owner = _name(folder.stat().st_uid)
        found = f"{paths.text(folder)} belongs to {owner}, and this is {account.name}"
        yield DeviceCheck("account", "failed", found, "sudo edge-fl device doctor")
        return
    yield DeviceCheck("account", "ok", f"the agent's is {account.name}")
    if foreign := list(_foreign(folder, account)):
        yield DeviceCheck(
            "own folder",
            "failed",
            f"not {account.name}'s: {shortened(foreign, MAX_NAMED, '; ')}",
            f"sudo chown -R {account.name}: {paths.text(folder)}",
        )
    elif folder.is_dir():
        yield DeviceCheck("own folder", "ok", f"all of {paths.text(folder)} belongs to {account.name}")
    if config.reads_folder:
        yield _data_folder(Path(location.parsed(config.data)[1]), account)


def _data_folder(data: Path, account: _Account) -> DeviceCheck:
    if not data.is_dir():
        return DeviceCheck("data folder", "skipped", f"{paths.text(data)} does not exist")
    found = _probe(data, account)
    if not found:
        return DeviceCheck(
            "data folder", "ok", f"{account.name} can read, label and delete all of {paths.text(data)}"
        )
    remedy = f"give {account.name} access to {paths.text(data)}, for example with a common group"
    if account.name == installation.ACCOUNT:
        remedy = "sudo edge-fl device share"
    if blocked := _blocked(data, account):
        remedy = (
            f"{account.name} may not enter {paths.text(blocked)}: move the data, for example to /srv/images"
        )
    return DeviceCheck(
        "data folder", "failed", f"as {account.name}: {shortened(found, MAX_NAMED, '; ')}", remedy
    )


def _probe(data: Path, account: _Account) -> list[str]:
    """What the account cannot read or write. Raises OSError, subprocess.SubprocessError."""
    if account.is_current:
        found = list(islice(folder_probe.problems(data), folder_probe.MAX_LINES))
        return [paths.text(line) for line in found]
    done = subprocess.run(
        [sys.executable, "-I", folder_probe.__file__, data],
        user=account.uid,
        group=account.gid,
        extra_groups=os.getgrouplist(account.name, account.gid),
        cwd="/",
        capture_output=True,
        timeout=PROBE_S,
        check=False,
    )
    if done.returncode:
        return [f"{account.name} cannot run {sys.executable}: {paths.text(os.fsdecode(done.stderr[-200:]))}"]
    return [paths.text(os.fsdecode(line)) for line in done.stdout.splitlines()]


def _account(folder: Path) -> _Account:
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0 and folder.is_dir():
        found = folder.stat()
        uid, gid = found.st_uid, found.st_gid
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return _Account(f"user {uid}", uid, gid, is_current=True)
    return _Account(entry.pw_name, uid, entry.pw_gid, is_current=uid == os.geteuid())


def _foreign(folder: Path, account: _Account) -> Iterator[str]:
    """Entries of the device's folder that another account owns."""
    if not folder.is_dir():
        return
    for count, path in enumerate(folder.rglob("*")):
        if count == MAX_ENTRIES:
            return
        owner = path.lstat().st_uid
        if owner != account.uid:
            yield f"{paths.text(path)} ({_name(owner)})"


def _blocked(data: Path, account: _Account) -> Path | None:
    """The first folder above the pictures that the account may not enter, by owner, group and mode."""
    groups = {account.gid, *(each.gr_gid for each in grp.getgrall() if account.name in each.gr_mem)}
    for folder in reversed(data.absolute().parents):
        found = folder.stat()
        shift = 6 if found.st_uid == account.uid else 3 if found.st_gid in groups else 0
        if account.uid and not found.st_mode >> shift & 1:
            return folder
    return None


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
