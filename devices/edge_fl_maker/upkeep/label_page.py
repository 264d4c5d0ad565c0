"""The label page as a service of a flashed board: switched on and off, and its address with the token."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from edge_fl.errors import InputError, RunError
from edge_fl.files.paths import text
from edge_fl.wire import host_names
from edge_fl_devices.board.installation import LABEL_PORT, LABEL_SERVICE, UNITS
from edge_fl_devices.config import DeviceConfig
from edge_fl_maker import access

SYSTEMCTL_S = 60.0


def require_installed() -> None:
    """Raise InputError where no label page is installed, or for another user than root."""
    unit = Path(UNITS) / LABEL_SERVICE
    if not unit.is_file():
        raise InputError(
            f"{text(unit)}: missing; expected a board of 'edge-fl flash' whose data are a folder"
            " (elsewhere: edge-fl device serve)"
        )
    if os.geteuid() != 0:
        raise InputError("not root; expected sudo")


def switch(*, on: bool) -> None:
    """Start the page now and at every boot, or neither. Raises RunError."""
    _systemctl("enable" if on else "disable", "--now", LABEL_SERVICE)


def is_on() -> bool:
    """Whether the page runs now."""
    return _systemctl("is-active", "--quiet", LABEL_SERVICE, check=False) == 0


def addresses(folder: Path, config: DeviceConfig) -> list[str]:
    """Addresses of the page, with its token. Raises InputError."""
    token, _ = access.token(folder)
    scheme = "https" if access.tls(config.broker.identity) else "http"
    name = socket.gethostname().partition(".")[0]
    own = [f"[{each}]" if ":" in each else each for each in host_names.own_addresses()]
    return [f"{scheme}://{host}:{LABEL_PORT}/label#token={token}" for host in (f"{name}.local", *own)]


def _systemctl(*arguments: str, check: bool = True) -> int:
    try:
        done = subprocess.run(
            ["systemctl", *arguments], capture_output=True, text=True, timeout=SYSTEMCTL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"systemctl {' '.join(arguments)}: {error}") from error
    if check and done.returncode:
        raise RunError(f"systemctl {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
    return done.returncode
