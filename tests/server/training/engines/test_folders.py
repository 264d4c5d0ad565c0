"""Temporary folders are removed with their owner, or by the next process if the owner was killed."""

import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

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

RAY_NODE = """
import sys, time
from pathlib import Path
from edge_fl_server.training.engines.folders import create

folder = create(Path(sys.argv[1]))
(folder / "session_1" / "logs").mkdir(parents=True)
(folder / "session_1" / "logs" / "agent.log").touch()
(folder / "0.bin").touch()
print(folder, flush=True)
time.sleep(600)
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_processes_that_log_to_a_ray_session_end_with_a_killed_owner(tmp_path):
    here, linked = tmp_path / "here", tmp_path / "linked"
    here.mkdir()
    linked.symlink_to(here)
    command = [sys.executable, "-c", RAY_NODE, str(linked)]
    with ExitStack() as stack:
        owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4])
        stack.enter_context(owner)
        stack.callback(owner.kill)
        assert owner.stdout
        folder = Path(owner.stdout.readline().strip())

        def follow(file: Path) -> subprocess.Popen[bytes]:
            process = stack.enter_context(subprocess.Popen(["tail", "-f", str(file)], start_new_session=True))
            stack.callback(process.kill)
            while file.resolve() not in [
                link.resolve() for link in Path(f"/proc/{process.pid}/fd").iterdir()
            ]:
                assert process.poll() is None
                time.sleep(0.01)  # it has to have the file open before its owner ends
            return process

        agent, other = follow(folder / "session_1" / "logs" / "agent.log"), follow(folder / "0.bin")
        owner.kill()
        assert agent.wait(90) == -signal.SIGKILL
        assert other.poll() is None
