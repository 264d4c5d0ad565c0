"""Accounts of this machine: who runs this process, and who may do what it may not."""

from __future__ import annotations

import getpass
import os
import pwd
from contextlib import suppress
from pathlib import Path

from edge_fl.files import paths


def local_user() -> str:
    """Who runs this process, for records of what people did: the user of the operating system."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return f"uid {os.getuid()}"


def not_allowed(path: Path, do: str = "read") -> str:
    """Which account may not do what, and which one may: the owner of the nearest place that this account can see."""
    owner = ""
    for place in (path, *path.absolute().parents):
        with suppress(OSError):
            owner = _name(place.stat().st_uid)
            break
    return (
        f"{paths.text(path)}: the account {_name(os.geteuid())} may not {do} it; expected the account"
        f" {owner}: put 'sudo -u {owner}' before the command"
    )


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
