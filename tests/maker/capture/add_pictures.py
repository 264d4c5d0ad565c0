"""Run by test_pool.py: `python -m tests.maker.capture.add_pictures FOLDER HOW`, with HOW one of

FIRST:END    add these scenes; prints what became of each
full         add scenes while files may not grow beyond a limit, then without the limit
kill         add a scene in children that die before their n-th change of the disk, for every n; prints the number of deaths
"""

import hashlib
import itertools
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

from edge_fl_devices.config import CaptureConfig
from edge_fl_maker.capture.pools import INDEX, Pool
from tests.maker.capture.scenes import scene

CONFIG = CaptureConfig(max_pictures=20, every_s=0.1)
CHANGES = {"os.rename", "os.remove", "os.mkdir", "open"}


def pool_in(folder: Path) -> Pool:
    """A pool without a rate: its clock advances by a second at each look."""
    return Pool(folder, CONFIG, clock=itertools.count().__next__)


def is_whole(pool: Pool) -> bool:
    """Whether the content of every picture is what its name says."""
    return all(
        hashlib.sha256(pool.path(name).read_bytes()).hexdigest().startswith(Path(name).stem)
        for name in pool.names()
    )


def add(folder: Path, first: int, end: int) -> None:
    pool = pool_in(folder)
    for number in range(first, end):
        added = pool.add(scene(number), f"scene {number}")
        sys.stdout.write(f"{added.why or added.name}\n")
        assert len(pool.names()) <= CONFIG.max_pictures + 1  # the other process may be writing one


def full(folder: Path) -> None:
    pool = pool_in(folder)
    for number in range(5):
        assert pool.add(scene(number), "a").name
    names, lines = pool.names(), (folder / INDEX).stat().st_size
    for bytes in (100, lines + 50):  # the picture does not fit; the picture fits, but not its line
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, resource.RLIM_INFINITY))
        sys.stdout.write(f"{pool.add(scene(5), 'a').why}\n")
        assert pool.names() == names and not list(folder.glob(".*.part"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert pool.add(scene(5), "a").name and len(pool.entries()) == 6


def die_before(step: int) -> None:
    """Let this process kill itself before its `step`-th change of the disk."""
    counter = itertools.count()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        reading = event == "open" and not int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES and not reading and next(counter) == step:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill(folder: Path) -> None:
    first, full_pool = folder / "first", pool_in(folder / "first")
    for number in range(CONFIG.max_pictures):
        assert full_pool.add(scene(number), "a").name
    for step in itertools.count():
        after = folder / str(step)
        shutil.copytree(first, after)
        child = os.fork()
        if child == 0:
            die_before(step)
            pool_in(after).add(scene(100), "child")  # drops two others
            os._exit(0)
        _, status = os.waitpid(child, 0)
        pool = pool_in(after)
        assert is_whole(pool) and 19 <= len(pool.names()) <= 21, f"step {step}"
        assert pool.add(scene(101), "b").name and pool.add(scene(100), "b").why in ("", "duplicate")
        assert is_whole(pool), f"step {step}"
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
            sys.stdout.write(f"{step}\n")
            return
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"step {step}: {status}"


if __name__ == "__main__":
    where, how = Path(sys.argv[1]), sys.argv[2]
    if how in ("full", "kill"):
        {"full": full, "kill": kill}[how](where)
    else:
        add(where, *map(int, how.split(":")))
