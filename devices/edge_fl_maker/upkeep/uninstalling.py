"""Remove what `edge-fl flash` installed on a board: service, program, settings, identity and the agent's folder."""

from __future__ import annotations

import pwd
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from edge_fl import toml
from edge_fl.errors import EdgeFLError, InputError
from edge_fl.files.paths import text
from edge_fl.files.shared import unshare
from edge_fl_devices.board.installation import ACCOUNT, INSTALLER, LABEL_SERVICE, SERVICE

SERVICES = (LABEL_SERVICE, SERVICE, INSTALLER)
UNITS = "etc/systemd/system"
FOLDERS = ("var/lib/edge-fl", "etc/edge-fl", "usr/local/bin/edge-fl", "opt/edge-fl")
"""In this order: the program itself last, so that an interrupted removal can be repeated."""
ONNXRUNTIME = (".cache/Microsoft/DeveloperTools/.onnxruntime", "tmp/.ses")
"""What onnxruntime writes while its telemetry is on, in a home folder and for all users: see `edge_fl.TELEMETRY_OFF`."""


def installed(root: Path = Path("/")) -> list[Path]:
    """What there is to remove, in order. Raises InputError if the pictures are in it."""
    units = [root / UNITS / name for name in SERVICES]
    wants = [root / UNITS / "multi-user.target.wants" / name for name in SERVICES]
    found = [
        path
        for path in (*wants, *units, *(root / name for name in FOLDERS))
        if path.exists() or path.is_symlink()
    ]
    if data := _data(root / "etc/edge-fl/config.toml"):
        for path in found:
            if data.is_relative_to(path) and data.is_dir():
                raise InputError(
                    f"the pictures are in {data}: expected them outside {text(path)}; move them first"
                )
    return found


def uninstall(paths: list[Path], root: Path = Path("/")) -> None:
    """Stop the services, give the pictures to their folder's owner, delete these paths, and the agent's user and group. Raises OSError."""
    live = (root / "run/systemd/system").is_dir()
    data = _data(root / "etc/edge-fl/config.toml")
    if live:
        _run("systemctl", "disable", "--now", *SERVICES)
    if data and data.is_dir():
        with suppress(KeyError):  # no such account
            account = pwd.getpwnam(ACCOUNT)
            unshare(data, account.pw_uid, account.pw_gid)
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if live:
        _run("systemctl", "daemon-reload")
        _run("userdel", ACCOUNT)
        _run("groupdel", ACCOUNT)  # userdel keeps a group that has other members


def left_by_dependencies(root: Path = Path("/")) -> list[Path]:
    """What onnxruntime wrote for accounts of this board, in versions of edge-fl before 0.1 or in other programs, which may still use it."""
    accounts = root / "etc/passwd"
    lines = accounts.read_text(errors="replace").splitlines() if accounts.exists() else []
    homes = {line.split(":")[5].lstrip("/") for line in lines if line.count(":") == 6}
    in_home, for_all = ONNXRUNTIME
    candidates = [*(root / home / in_home for home in sorted(homes)), root / for_all]
    return [path for path in candidates if path.exists()]


def _data(config: Path) -> Path | None:
    """The data folder in the board's settings; None if there are none."""
    with suppress(EdgeFLError):
        data = str(toml.read(config).get("data", "")) if config.exists() else ""
        return Path(data.removeprefix("folder:")) if data else None
    return None


def _run(*command: str) -> None:
    """Run a system command; what it cannot do (a service that was never enabled) does not matter."""
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, capture_output=True, timeout=60, check=False)
