"""A person's own modules (`--model mine:Wide`): looked for in the folder that a command is started in, too, as `python -m` does.

For commands that a person starts only. A device, which builds what a server names, keeps to what is installed on it.
"""

from __future__ import annotations

import sys
from pathlib import Path


def from_here() -> None:
    """From now on, here and in the children of this process; what is installed goes first."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
