"""Boards that run edge-fl from wheels, through the launcher, and wheels of other versions of it.

The installation (`factory`) is a virtual environment with the wheel of this source tree, and this Python's packages behind it.
"""

import io
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from edge_fl import TELEMETRY_OFF, __version__
from edge_fl.release import device_wheel
from edge_fl.wire.endpoint import Endpoint
from edge_fl_devices.agent_update import environment, launcher
from edge_fl_devices.agent_update.state import Updates
from edge_fl_devices.storage.store import Store

WAIT_S = 90.0
Patches = Mapping[str, tuple[str, str]]
"""By file of the wheel: text, and its replacement."""
NONE: Patches = {}
CRASHES = {
    "edge_fl_devices/runtime/runner.py": (
        "        self._notifier.ready()\n",
        "        raise SystemExit('crashes at its start')\n",
    )
}
UNCONNECTED = {
    "edge_fl_devices/runtime/connection.py": (
        "        self._transport = connect(",
        "        self._transport = (lambda *all: None)(",
    )
}
OTHER_CLASSES = {
    "edge_fl_devices/serving/predict.py": (
        "probabilities(self.head.logits(z))",
        "probabilities(-self.head.logits(z))",
    )
}


def wheel(folder: Path, version: str = __version__, patches: Patches = NONE) -> Path:
    """Write the wheel of this source tree with another version, and with `patches`."""
    name, payload = device_wheel.pack()
    return rewritten(folder, name, payload, version, patches)


def rewritten(folder: Path, name: str, payload: bytes, version: str, patches: Patches = NONE) -> Path:
    """Write a wheel of edge-fl under another version."""
    old, new = f"edge_fl-{__version__}", f"edge_fl-{version}"
    files = {}
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        for path in archive.namelist():
            if path.endswith(("/RECORD", "/WHEEL")):
                continue
            text = archive.read(path)
            if path.endswith("/METADATA"):
                text = text.replace(f"\nVersion: {__version__}".encode(), f"\nVersion: {version}".encode())
            if path == "edge_fl/__init__.py":
                text = text.replace(__version__.encode(), version.encode())
            if path in patches:
                before, after = patches[path]
                assert before.encode() in text, f"{path} has no {before!r}"
                text = text.replace(before.encode(), after.encode())
            files[path.replace(old, new)] = text
    target = folder / name.replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    target.write_bytes(device_wheel._zip(files, f"{new}.dist-info"))
    return target


def factory(folder: Path, built: Path | None = None, hook: str = "") -> Path:
    """Install a wheel (this source tree's); `hook` is code that runs at every start of its Python, also of environments on top of it."""
    behind = folder / "behind"
    python = environment.python(behind)
    python.parent.mkdir(parents=True)
    purelib = Path(environment._paths(behind)["purelib"])
    purelib.mkdir(parents=True)
    (purelib / "python.pth").write_text(sysconfig.get_path("purelib") + "\n")
    home = folder / "factory"
    (home / environment.WHEELS).mkdir(parents=True)
    environment.build(home, behind, {built or wheel(home / environment.WHEELS): 1 << 30})
    if hook:
        (purelib / "hook.py").write_text(hook)
        (purelib / "hook.pth").write_text("import hook\n")
    return home


@dataclass
class Board:
    """One board; `update`: settings of updates, None for a version that does not know them."""

    folder: Path
    factory: Path
    name: str
    port: int
    data: Path
    update: dict[str, Any] | None = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    head: str = "nearest"
    fleet: str = "agents"
    identity: Path | None = None
    prefix: list[str] = field(default_factory=list)  # what starts the command, as in tests.network
    process: subprocess.Popen[bytes] | None = None

    @property
    def updates(self) -> Updates:
        return Updates(self.folder / "agent", self.factory)

    @property
    def home(self) -> Path:
        return self.folder / "device"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def start(self) -> subprocess.Popen[bytes]:
        """Start as systemd does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        update = {"confirm_s": 1.0, "trial_s": 60.0, **self.update} if self.update is not None else {}
        lines = [
            f'id = "{self.name}"',
            f'data = "{self.data}"',
            f'folder = "{self.home}"',
            'tier = "head"',
            f'head = "{self.head}"',
        ]
        lines += ["watch_s = 0", "[broker]", f"port = {self.port}", f'fleet = "{self.fleet}"']
        lines += [f'identity = "{self.identity}"'] if self.identity else []
        lines += ["[update]"] if update else []
        lines += [f"{key} = {json.dumps(value)}" for key, value in update.items()]
        config = self.folder / "config.toml"
        config.write_text("\n".join(lines) + "\n")
        # without what this process has set at its import of edge_fl
        others = ("PYTHONPATH", "NOTIFY_SOCKET", *TELEMETRY_OFF)
        variables = {name: value for name, value in os.environ.items() if name not in others}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *self.prefix,
                    *(sys.executable, launcher.__file__, str(self.updates.home), str(self.factory)),
                    *("device", "run", "--config", str(config)),
                ],
                env={**variables, **self.environment, "OMP_NUM_THREADS": "1"},
                stderr=log,
                stdout=log,
                start_new_session=True,
            )
        return self.process

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Cut the power: all processes of the board."""
        if self.process:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def own_files(home: Path) -> dict[str, bytes]:
    """Heads, outbox, installed releases, privacy budget, and memory without starts, the numbers of signed messages and the agent's version.

    The version of the agent that started last, and the one that was offered, are what an update changes.
    """
    changing = {
        "signed": 0,
        "signed_command": 0,
        "signed_update": 0,
        "starts": 0,
        "agent": "",
        "offered_agent": 0,
    }
    memory = msgspec.structs.replace(Store(home).memory(), **changing)
    paths = [path for name in ("heads", "outbox", "release") for path in (home / name).rglob("*")]
    paths = [path for path in [*paths, home / "privacy.safetensors"] if path.is_file()]
    files = {str(path.relative_to(home)): path.read_bytes() for path in paths}
    return {**files, "memory.json": msgspec.json.encode(memory)}


def eventually(claim: Callable[[], object], what: str = "", deadline_s: float = WAIT_S) -> None:
    until = time.monotonic() + deadline_s
    while not claim():
        assert time.monotonic() < until, f"did not happen: {what}"
        time.sleep(0.05)


def endpoint(port: int) -> Endpoint:
    return Endpoint("127.0.0.1", port)
