"""Worker processes start wherever the folder for temporary files is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

POOL = """
import os
from multiprocessing import util
from edge_fl_server.training.engines import processes

if __name__ == "__main__":
    assert processes.pool(1).submit(os.getpid).result() != os.getpid()
    print(util.get_temp_dir())
"""


def test_a_long_name_of_the_temporary_folder_does_not_matter(tmp_path: Path) -> None:
    long = tmp_path / ("temporary-" * 12)
    long.mkdir()
    script = tmp_path / "script.py"
    script.write_text(POOL)
    variables = os.environ | {"TMPDIR": str(long), "PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run([sys.executable, str(script)], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).exists() and not list(long.iterdir())


PREPARED = """
import multiprocessing, os, sys, threading
from multiprocessing import forkserver
from edge_fl_server.training.engines import processes

if sys.argv[1] == "thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
processes.prepare()
server = forkserver._forkserver._forkserver_pid
forked = server is not None and os.readlink(f"/proc/{server}/exe") == os.readlink("/proc/self/exe")
print("forked" if forked else "not forked", processes.start_seconds(2))
pool = processes.pool(2)
print(pool.submit(os.getppid).result(60) == forkserver._forkserver._forkserver_pid)
print(pool.submit(sum, [1, 2]).result(60))
print(sorted(map(int, pool.map(abs, [-1, -2, -3]))))
"""


@pytest.mark.parametrize(("threads", "first"), [("alone", "forked 0.1"), ("thread", "not forked 4.0")])
def test_workers_are_forked_from_a_process_without_other_threads(threads: str, first: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PREPARED, threads], capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout.split("\n")[:4] == [first, "True", "3", "[1, 2, 3]"], found.stderr
    assert not found.stderr


COLLECTED = """
import gc
from pathlib import Path
from edge_fl_server.training.engines import processes

def copied():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty:"))

processes.prepare()
before = copied()
gc.collect()
print(copied() - before)
"""


def test_a_garbage_collection_does_not_copy_the_memory_shared_with_the_fork_server() -> None:
    found = subprocess.run(
        [sys.executable, "-c", COLLECTED], capture_output=True, text=True, timeout=120, check=True
    )
    assert int(found.stdout) < 10e6


RETURNED = """
import torch
from pathlib import Path
from edge_fl_server.training.engines import processes

def used():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

processes.keep_memory()
before = used()
tensors = [torch.ones(500_000) for _ in range(30)]
last = torch.ones(1_000)
del tensors
print(used() - before)
processes.return_memory()
print(used() - before)
"""


def test_a_process_can_return_memory_that_it_kept() -> None:
    found = subprocess.run(
        [sys.executable, "-c", RETURNED], capture_output=True, text=True, timeout=120, check=True
    )
    kept, after = map(int, found.stdout.split())
    assert kept > 50e6, "nothing was kept that could be returned"
    assert after < 10e6


DYING = """
import os, socket, sys
from multiprocessing import forkserver, util
from edge_fl_server.training.engines import processes

processes.prepare()
server = forkserver._forkserver
os.close(server._forkserver_alive_fd)
os.waitpid(server._forkserver_pid, 0)
address, (told, tell) = f"{util.get_temp_dir()}/closed", os.pipe()
with socket.socket(socket.AF_UNIX) as never_listens:
    never_listens.bind(address)
if (pid := os.fork()) == 0:  # a killed fork server, whose socket is closed already
    os.read(told, 1)
    os._exit(9)
alive, server._forkserver_alive_fd = os.pipe()
server._forkserver_address, server._forkserver_pid = address, pid
refused = []

def connecting(event, arguments):
    if event == "socket.connect" and arguments[1] == address:
        refused.append(os.waitpid(pid, os.WNOHANG))
        os.write(tell, b"!")

sys.addaudithook(connecting)
print(processes.pool(1).submit(sum, [1, 2]).result(60), refused)
"""


def test_a_fork_server_that_is_about_to_end_is_replaced() -> None:
    found = subprocess.run([sys.executable, "-c", DYING], capture_output=True, text=True, timeout=120)
    assert found.stdout == "3 [(0, 0)]\n", found.stderr
