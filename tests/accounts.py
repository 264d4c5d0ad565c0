"""Real accounts of this machine for tests as root: made for a test, deleted after it, and programs that run as them."""

import atexit
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

TOOLS = ("useradd", "userdel", "groupdel", "setpriv")
REPOSITORY = Path(__file__).parents[1]


@dataclass(frozen=True)
class Account:
    """An account with its own group, and the groups of which it is a member."""

    name: str
    uid: int
    gid: int

    def run(
        self, *command: str | Path, check: bool = True, umask: int = 0o022, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as this account, with its groups."""
        become = ["setpriv", f"--reuid={self.uid}", f"--regid={self.gid}", "--init-groups"]
        done = subprocess.run(
            [*(become if self.uid else []), *command],
            umask=umask,
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **variables},
        )
        assert done.returncode == 0 or not check, f"{self.name}: {command}: {done.stdout}{done.stderr}"
        return done

    def python(
        self, *arguments: str | Path, check: bool = True, umask: int = 0o022, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python with this repository's packages as this account."""
        return self.run(*interpreter(), *arguments, check=check, umask=umask, **variables, **packages())


ROOT = Account("root", 0, 0)


@contextmanager
def account(group: str = "") -> Iterator[Account]:
    """Make an account, a member of `group` as well; delete both the account and its group at the end."""
    if os.geteuid() != 0 or not all(map(shutil.which, TOOLS)):
        pytest.skip(f"accounts need root and {', '.join(TOOLS)}")
    interpreter()
    name = f"efl-{secrets.token_hex(4)}"
    more = ["--groups", group] if group else []
    subprocess.run(["useradd", "--system", "--user-group", "--no-create-home", *more, name], check=True)
    try:
        import pwd

        entry = pwd.getpwnam(name)
        yield Account(name, entry.pw_uid, entry.pw_gid)
    finally:
        delete = ["userdel", "--force", name]  # also while a process of the account is ending
        subprocess.run(delete, check=True, capture_output=True)
        subprocess.run(["groupdel", name], check=False, capture_output=True)


def interpreter() -> list[str]:
    """The command of a Python that every account can start: this one, else the system's of the same version; else skip the test."""
    for python in (sys.executable, "/usr/bin/python3"):
        code = f"import sys, numpy, edge_fl; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        done = subprocess.run(
            [*nobody, "sh", "-c", 'exec "$0" -c "$1"', python, code],
            env={"PATH": os.environ["PATH"], **packages()},
            capture_output=True,
            cwd="/",
            check=False,
        )
        if done.returncode == 0:
            return [python]
    pytest.skip("no Python here that another account can start")


def reachable(folder: Path) -> Path:
    """Make a folder that every account can enter, in place of a test's own; it is deleted when the tests end.

    Each pytest process that starts closes the folder above all tests' folders to other accounts, also while others run.
    """
    open_to_all = Path(tempfile.mkdtemp(prefix=f"{folder.name[:20]}-"))
    open_to_all.chmod(0o755)
    atexit.register(shutil.rmtree, open_to_all, ignore_errors=True)
    return open_to_all


def packages() -> dict[str, str]:
    """Environment variables with which another Python finds this repository's packages."""
    installed = [path for path in sys.path if path.endswith("site-packages")]
    folders = (REPOSITORY, *(REPOSITORY / name for name in ("broker", "devices", "server")))
    return {"PYTHONPATH": ":".join([*installed, *map(str, folders)]), "PYTHONDONTWRITEBYTECODE": "1"}
