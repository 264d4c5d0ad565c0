"""The boards of the soak: real agents under the launcher, on this machine and in an emulated aarch64 root, each with its pictures."""

import fcntl
import json
import shutil
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from edge_fl_devices.agent_update import launcher
from edge_fl_devices.agent_update.state import Updates
from edge_fl_devices.flash import wheels
from tests import agents
from tests.arm64 import apart, userland
from tests.soak.world import LIBRARY, SLEEP, Calendar, Service, variables

WATCH_S = 1.0
SITE = "opt/edge-fl/factory"


@dataclass
class Board:
    """One board. `root` is what its agent sees as /, `calendar` its clock."""

    name: str
    folder: Path
    factory: Path
    port: int
    head: str
    root: Path = Path("/")
    calendar: Calendar = field(init=False)
    service: Service = field(init=False)

    def __post_init__(self) -> None:
        for path in (self.pictures, self.home, self.etc, self._hook):
            path.mkdir(parents=True)
        (self._hook / "sitecustomize.py").write_text(SLEEP)
        self.calendar = Calendar(self.folder / "clock")
        self.calendar.set(0)
        (self.etc / "config.toml").write_text(self._config())
        self.service = self.service_of("device", "run", "--config", self.inside(self.etc / "config.toml"))

    @property
    def pictures(self) -> Path:
        """Its pictures, a folder per class."""
        return self.folder / "pictures"

    @property
    def home(self) -> Path:
        """The agent's folder."""
        return self.folder / "device"

    @property
    def etc(self) -> Path:
        """Its settings and its identity."""
        return self.folder / "etc"

    @property
    def updates(self) -> Updates:
        """The agent's versions."""
        return Updates(self.folder / "agent", self.factory)

    def inside(self, path: Path) -> str:
        """A path as the agent sees it."""
        return f"/{path.relative_to(self.root)}"

    def enrol(self, identity: Path) -> None:
        """Give it its certificate."""
        shutil.copytree(identity, self.etc / "identity")

    def stop(self) -> None:
        """Stop the agent in order."""
        self.service.stop()
        self._wait_ended()

    def kill(self) -> None:
        """Cut the power of the board."""
        self.service.kill()
        self._wait_ended()

    def _wait_ended(self) -> None:
        """Wait until no process of the agent is left: those of another root end a moment after the one that started them."""

        def unlocked() -> bool:
            try:
                with (self.home / "lock").open("w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError:  # no lock yet
                return True
            return True

        agents.eventually(unlocked, f"{self.name} has ended")

    def service_of(self, *words: str) -> Service:
        """A command of edge-fl on this board, under the launcher."""
        paths = (self.inside(self.folder / "agent"), self.inside(self.factory))
        command = [*self._python(), *paths, *words]
        return Service(command, self.folder / "log", self._environment(), self.folder)

    def run(self, *words: str) -> None:
        """Run a command of edge-fl on this board that must succeed."""
        service = self.service_of(*words)
        service.start()
        assert service.process and service.process.wait(300) == 0, service.tail()

    def _config(self) -> str:
        lines = {
            "id": self.name,
            "data": self.inside(self.pictures),
            "folder": self.inside(self.home),
            "tier": "head",
            "head": self.head,
            "watch_s": WATCH_S,
            "refit_every_s": WATCH_S,
            "broker.port": self.port,
            "broker.identity": self.inside(self.etc / "identity"),
            "update.confirm_s": 1.0,
            "update.trial_s": 600.0,
        }
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in lines.items())

    @property
    def _hook(self) -> Path:
        """For the launcher's Python, which is not that of an installation."""
        return self.folder / "hook"

    def _python(self) -> Sequence[str]:
        return (sys.executable, launcher.__file__)

    def _environment(self) -> dict[str, str]:
        return {**variables(), **self.calendar.environment(), "PYTHONPATH": str(self._hook)}


class ArmBoard(Board):
    """The same in an aarch64 userland: every program of its agent runs under emulation."""

    def _python(self) -> Sequence[str]:
        file = self.inside(self.calendar.file)
        clock = self.calendar.environment(f"/usr/lib/aarch64-linux-gnu/{LIBRARY}", file)
        inside = [
            *(f"{name}={value}" for name, value in clock.items()),
            "OMP_NUM_THREADS=1",
            f"PYTHONPATH={self.inside(self._hook)}",
        ]
        start = (sys.executable, apart.__file__, str(self.root), "/usr/bin/env", *inside)
        return (*start, "/usr/bin/python3", self.inside(self.factory / "launcher.py"))

    def _environment(self) -> dict[str, str]:
        path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
        return {**path, "QEMU_CPU": userland.CPU}


def arm_root(folder: Path) -> Path:
    """A userland with edge-fl installed by unpacking its wheels, which takes seconds instead of the minutes of an emulated pip."""
    if not (userland.QEMU and shutil.which(userland.QEMU)):
        pytest.skip(f"no {userland.QEMU} here")
    root = userland.copy(userland.build([*userland.BASE, "libfaketime"]), folder)
    version = userland.python(root)
    site = root / SITE / f"lib/python{version}/site-packages"
    site.mkdir(parents=True)
    gathered = wheels.gather((version,), userland.cache_folder() / "wheels", offline=True)
    own = agents.wheel(folder.parent / "own")
    for wheel in (*gathered.files, own):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    (site / "hook.py").write_text(SLEEP)
    (site / "hook.pth").write_text("import hook\n")
    python = root / SITE / "bin/python"
    python.parent.mkdir()
    python.symlink_to("/usr/bin/python3")
    (root / SITE / "pyvenv.cfg").write_text(f"home = /usr/bin\nversion = {version}\n")
    shutil.copy(launcher.__file__, root / SITE / "launcher.py")
    return root
