"""Temporary folders of simulated clients, removed with their owners; those of a killed process by its cleaner or the next `create`.

The cleaner is a shell in a session of its own, so that signals to the process group do not reach it. A living process holds a lock on a
file in its folder, so a folder whose lock is free can be removed. Ray's agents may outlive a killed node for minutes; the cleaner kills
the processes that have files of a Ray session in its folders open.
"""

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO

PREFIX, UNLOCKED_PREFIX, LOCK = "edge-fl-clients-", "edge-fl-making-", "owner.lock"
SHARED_MEMORY = Path("/dev/shm")
# Input: one path per line, until all writers have ended. Semaphores are files that Python's resource tracker removes, unless it was killed.
CLEANER = """
trap '' HUP INT TERM
kill_users() ( # of the files in a folder
  cd -P -- "$1" || exit
  for try in 1 2 3 4 5; do
    links=$(find /proc/[0-9]*/fd -lname "$PWD/*")
    [ "$links" ] || exit
    for link in $links; do
      pid=${link#/proc/}
      pid=${pid%%/*}
      [ -O "/proc/$pid" ] && kill -KILL "$pid"
    done
    sleep 0.1
  done
)
while IFS= read -r path; do set -- "$@" "$path"; done
for try in 1 2 3 4 5; do
  left=
  for path; do
    for session in "$path"/session_*; do [ -d "$session" ] && kill_users "$session"; done
    [ -d "$path" ] && rm -rf -- "$path"
    [ -e "$path" ] && left=1
  done
  [ "$left" ] || exit
  sleep 0.5
done
rm -f -- "$@"
"""

_locks: dict[Path, IO[str]] = {}


def create(parent: Path | None = None) -> Path:
    """Create a folder in `parent` (default: the system's folder for temporary files)."""
    parent = parent or Path(tempfile.gettempdir())
    remove_abandoned(parent)
    unlocked = Path(tempfile.mkdtemp(prefix=UNLOCKED_PREFIX, dir=parent.absolute()))
    remove_at_end(unlocked)
    remove_at_end(_locked(unlocked))
    lock = (unlocked / LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    # renamed when locked: another process must not see it without a lock
    folder = unlocked.rename(_locked(unlocked))
    _locks[folder] = lock
    return folder


def remove_with(owner: object, folder: Path) -> Path:
    """Remove the folder when `owner` is garbage-collected; returns the folder."""
    weakref.finalize(owner, _remove, folder)
    return folder


def remove_at_end(path: Path) -> None:
    """Remove the absolute path when this process has ended in any way."""
    if b"\n" not in os.fsencode(path):
        with suppress(BrokenPipeError):  # the cleaner was killed
            os.write(_cleaner(os.getpid()), os.fsencode(path) + b"\n")


def remove_abandoned(*parents: Path) -> None:
    """Remove the folders of killed processes in `parents` (default: the folder for temporary files and the shared memory)."""
    for parent in parents or (Path(tempfile.gettempdir()), SHARED_MEMORY):
        for path in parent.glob(f"{PREFIX}*/{LOCK}"):
            with suppress(OSError), path.open() as lock:  # its owner is alive, or it belongs to another user
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_tree(path.parent)


@cache
def _cleaner(pid: int) -> int:
    """Start the cleaner of this process -> the descriptor of its input."""
    output, input = os.pipe()
    to = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_WRONLY, 0) for number in (1, 2)]
    try:
        actions = [(os.POSIX_SPAWN_DUP2, output, 0), *to]
        os.posix_spawn("/bin/sh", ["sh", "-c", CLEANER], os.environ, file_actions=actions, setsid=True)
    except OSError:  # an image without a shell
        return os.open(os.devnull, os.O_WRONLY)
    finally:
        os.close(output)
    return input


def _locked(unlocked: Path) -> Path:
    return unlocked.with_name(unlocked.name.replace(UNLOCKED_PREFIX, PREFIX))


def _remove(folder: Path) -> None:
    with suppress(OSError):
        _remove_tree(folder)
    _locks.pop(folder).close()


def _remove_tree(folder: Path) -> None:
    # renamed first: a worker that still runs cannot add a file
    renamed = folder.rename(folder.with_name(folder.name.replace(PREFIX, UNLOCKED_PREFIX)))
    shutil.rmtree(renamed, ignore_errors=True)
