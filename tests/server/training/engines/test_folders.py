"""Temporary folders are removed with their owner, or by the next process if the owner was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from edge_fl_server.training.engines.folders import create, remove_with

KILLED = """
import os, signal, sys
from pathlib import Path
from edge_fl_server.training.engines.folders import create, remove_with

class Owner: ...

def no_shell(*arguments, **settings):
    raise FileNotFoundError("/bin/sh")

os.posix_spawn = no_shell  # otherwise the cleaner could be sooner than the next process
owner = Owner()
remove_with(owner, create(Path(sys.argv[1])))
os.kill(os.getpid(), signal.{how})
"""


class Owner: ...


def test_a_folder_is_removed_with_its_owner(tmp_path):
    owner = Owner()
    folder = remove_with(owner, create(tmp_path))
    assert folder.is_dir()
    del owner
    assert not list(tmp_path.iterdir())


def test_folders_of_a_killed_process_are_removed_by_the_next_one(tmp_path):
    for how in ("SIGTERM", "SIGKILL"):
        command = [sys.executable, "-c", KILLED.format(how=how), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[4])
        assert done.returncode < 0
    left = set(tmp_path.iterdir())
    assert left
    owner = Owner()
    folder = remove_with(owner, create(tmp_path))
    other = Owner()
    second = remove_with(other, create(tmp_path))
    assert set(tmp_path.iterdir()) == {folder, second}  # folders of living owners stay
