"""Where `edge-fl flash` installs a device on a board: account, folders, units, and settings."""

from __future__ import annotations

import os
from pathlib import Path

ACCOUNT = "edge-fl"
"""The agent's user, and its group, whose members share the pictures."""
ETC, VAR = "/etc/edge-fl", "/var/lib/edge-fl"
SERVICE, LABEL_SERVICE, INSTALLER = "edge-fl.service", "edge-fl-label.service", "edge-fl-install.service"
UNITS = "/etc/systemd/system"
LABEL_PORT = 8000
CONFIG_VARIABLE = "EDGE_FL_CONFIG"
"""Set by the command `edge-fl` of a board: the settings that it was flashed with."""


def settings_file() -> Path | None:
    """The settings that this board was flashed with; None elsewhere."""
    found = os.environ.get(CONFIG_VARIABLE)
    return Path(found) if found and Path(found).is_file() else None
