"""Import a user's own modules (`--model mine:Wide`) from the working directory, as `python -m` does.

Only for commands started by a person. A device builds what a server names, so it imports installed packages only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def allow() -> None:
    """Add the working directory to the import path of this process and its children, after the installed packages."""
    if (here := os.fspath(Path.cwd())) not in sys.path:
        sys.path.append(here)
