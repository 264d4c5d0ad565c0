"""Folders of a pool go with their owner, and with the next one if the owner was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from server.training.engines.folders import make, until_gone

KILLED = """
import os, signal, sys
from pathlib import Path
from server.training.engines.folders import make, until_gone

class Owner: ...

owner = Owner()
until_gone(owner, make(Path(sys.argv[1])))
os.kill(os.getpid(), signal.{how})
"""


class Owner: ...


def test_a_folder_goes_with_its_owner(tmp_path):
    owner = Owner()
    made = until_gone(owner, make(tmp_path))
    assert made.is_dir()
    del owner
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_goes_when_the_next_one_begins(tmp_path):
    for how in ("SIGTERM", "SIGKILL"):
        command = [sys.executable, "-c", KILLED.format(how=how), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[4])
        assert done.returncode < 0
    left = set(tmp_path.iterdir())
    assert left
    owner = Owner()
    made = until_gone(owner, make(tmp_path))
    other = Owner()
    also = until_gone(other, make(tmp_path))
    assert set(tmp_path.iterdir()) == {made, also}  # who lives keeps his
