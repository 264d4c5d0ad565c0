"""Nothing but the named messages leaves a device: every command, and the whole life of an agent, in a network that records every contact.

The commands that the documentation runs are recorded by `tests/test_docs.py`; this file runs all others.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import pytest
from packaging.version import Version
from PIL import Image

from edge_fl import TELEMETRY_OFF, cli
from tests import agents
from tests.agents import Board, eventually
from tests.network import Network, allowed, recorded_network
from tests.test_docs import RUN, words

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not allowed(), reason="no network namespaces here: only root may make them"),
]
BROKER, PAGE = "tcp 127.0.0.1 1883", "tcp 127.0.0.1 8000"
SILENT_S = 12.0
"""Longer than onnxruntime 1.31 waits after its import before it looks its host up (9.2 s)."""

SILENT_IN_CI = (
    "CI",
    "GITHUB_ACTIONS",
    "GITLAB_CI",
    "TF_BUILD",
    "BUILDKITE",
    "JENKINS_URL",
    "ORT_RUNNING_UNIT_TESTS",
)

LIFE = [
    "device predict photo.png --dir board/device",
    "device doctor --config board/config.toml",
    "device status --dir board/device",
    "device watch --dir board/device --camera film.avi --limit 2 --config board/config.toml",
    "device logs pi",
    "device diagnose pi --out diagnosis",
    "fleet admit pi",
    "release pause",
    "release abort",
    "release export public",
    "release sign public --signing-key signing.pem",
    "server mcp",
]
"""While the agent runs; `fleet admit`, `pause` and `abort` have nothing to do and say so."""

STOPPED = [
    "device share --dir board/device",
    "device label",
    "device backup saved --dir board/device",
    "device reset --dir board/device --yes",
    "device restore saved --dir board/device --yes",
    "device uninstall",
]
"""When it is stopped; nothing is installed that `uninstall` could remove, no account of an agent, and no service of the label page."""

ALONE = [
    "broker config --insecure",
    "fleet enrol --baked pi-1",
    "fleet certificates",
    "fleet rotate runs/identities/devices/pi-1",
    "simulate --dataset digits --clients 3 --rounds 1 --set method.epochs=1 --runs runs",
    "report {run}",
    "plots {run}",
    "newtask {run} --dataset digits --clients 2 --iterations 2",
    "models list",
    "heads list",
]
NOTHING_TO_DO = 4
FAILS = dict.fromkeys(
    ("release pause", "release abort", "device uninstall", "device label", "device share --dir board/device"),
    NOTHING_TO_DO,
)
DOWNLOADS = {
    "data download mnist": 4,
    "flash --id pi-1 --out card --insecure --host 127.0.0.1 --wheels wheels": 1,
}
"""Commands that fetch what their user asks for, and their exit codes: they contact those hosts, and no others."""

SERVICES = [
    "broker up --insecure",
    "server up",
    "server dashboard --port 8080",
    "server worker --database runs/server/registry.sqlite",
]
APART = ["device run", "device serve", "release agent", "release publish"]
"""Run by the life of an agent."""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with recorded_network(tmp_path) as network:
        yield network


def unswitched() -> dict[str, str]:
    """The environment of a user: without what this process has set at its import of edge_fl, and what hints at a CI.

    onnxruntime is silent in what it takes for a CI (those of its variables that CIs of edge-fl set).
    """
    return {name: value for name, value in os.environ.items() if name not in {*TELEMETRY_OFF, *SILENT_IN_CI}}


class Place:
    """Runs commands in a folder, in a recorded network, and as a user whose home is in that folder."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder, self._network = folder, network
        (folder / "home").mkdir()
        self.environment = {**unswitched(), "HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}

    def popen(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._network.prefix, *command],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **options,
        )

    def python(self, code: str) -> str:
        """Run a program that must succeed -> its output."""
        process = self.popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
        return output

    def run(self, command: str, expected: int = 0) -> str:
        """Run a command of edge-fl -> its output."""
        process = self.popen([sys.executable, "-m", "edge_fl", *shlex.split(command)], stdout=subprocess.PIPE)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == expected, f"{command}: {process.returncode}\n{output[-3000:]}"
        return output

    @contextmanager
    def running(self, command: str) -> Iterator[Path]:
        """Run a command until the end of the block -> its log."""
        log = self.folder / f"{len(list(self.folder.glob('*.log')))}.log"
        with log.open("w") as out:
            process = self.popen([sys.executable, "-m", "edge_fl", *shlex.split(command)], stdout=out)
        try:
            yield log
            assert process.poll() is None, log.read_text()[-3000:]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            process.wait(60)


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    if not hasattr(command, "commands"):
        yield " ".join(path)
        return
    for name, below in command.commands.items():
        yield from leaves(below, (*path, name))


def test_every_command_runs_in_a_recorded_network() -> None:
    from typer.main import get_command

    all_ = set(leaves(get_command(cli.load(metadata.entry_points(group=cli.ENTRY_POINTS)).root)))
    here = [*LIFE, *STOPPED, *ALONE, *DOWNLOADS, *SERVICES, *APART]
    documented = [" ".join(words(command)) for command in RUN if command.startswith("edge-fl ")]
    run = {name for name in all_ for command in [*here, *documented] if f"{command} ".startswith(f"{name} ")}
    assert run == all_


def test_a_lookup_and_a_connection_are_recorded(tmp_path: Path, network: Network) -> None:
    place = Place(tmp_path, network)
    place.python(
        "import socket\n"
        "try: socket.create_connection(('telemetry.example', 443), 1)\n"
        "except OSError: pass\n"
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.7', 9))"
    )
    eventually(
        lambda: network.foreign() == {"name telemetry.example", "tcp 198.51.100.7 443", "udp 192.0.2.7 9"}
    )


SESSION = """
import time
{imports}
import onnxruntime
from edge_fl_devices.features import extractor
session = extractor._session(extractor.IDENTITY + bytes([13]))
time.sleep({seconds})
"""


def test_onnxruntime_is_silent_after_any_of_our_packages(tmp_path: Path, network: Network) -> None:
    place = Place(tmp_path, network)
    packages = ("edge_fl", "edge_fl_broker", "edge_fl_devices", "edge_fl_server")
    codes = [SESSION.format(imports=f"import {name}", seconds=SILENT_S) for name in packages]
    running = [place.popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for code in codes]
    for process in running:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    assert not network.used() and not [*(tmp_path / "home").rglob("*")]


def test_an_unswitched_onnxruntime_is_seen(tmp_path: Path, network: Network) -> None:
    if Version(metadata.version("onnxruntime")) < Version("1.29"):
        pytest.skip("onnxruntime sends nothing before 1.29")
    place = Place(tmp_path, network)
    code = SESSION.format(imports="import onnxruntime", seconds=300)
    process = place.popen([sys.executable, "-c", code])
    try:
        eventually(lambda: any(line.startswith("name ") for line in network.foreign()), "a lookup")
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
def test_an_agents_life_contacts_its_broker_only(tmp_path: Path, network: Network) -> None:
    cv2 = pytest.importorskip("cv2")
    place = Place(tmp_path, network)
    Image.linear_gradient("L").save(tmp_path / "photo.png")
    for number in range(24):
        folder = tmp_path / "pictures" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 100, (16, 16, 3)) + 150 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    film = cv2.VideoWriter(str(tmp_path / "film.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 5, (16, 16))
    for number in range(8):
        film.write(np.full((16, 16, 3), 30 * number, np.uint8))
    film.release()
    good = agents.wheel(tmp_path / "wheels", "0.2.0")
    factory = agents.factory(tmp_path / "installation")
    board = Board(
        tmp_path / "board", factory, "pi", 1883, tmp_path / "pictures", fleet="main", head="logistic"
    )
    board.prefix, board.environment = network.prefix, {"HOME": str(tmp_path / "home")}
    with ExitStack() as stack:
        first, second, *others = SERVICES
        log = stack.enter_context(place.running(first))
        eventually(lambda: "stop with Ctrl-C" in log.read_text(), "the broker")
        tried = network.used() - {BROKER}  # `broker up` has tried mosquitto on a free port
        assert all(contact.startswith("tcp 127.0.0.1 ") for contact in tried)
        stack.enter_context(place.running(second))
        eventually((tmp_path / "runs/server/registry.sqlite").exists, "the server's registry")
        for command in others:
            stack.enter_context(place.running(command))
        place.run("release publish --model cnn-tiny --size 16 --classes cat,dog")
        stack.callback(board.stop)
        board.start()
        eventually(lambda: any(board.home.glob("heads/*")), "a head is fitted")
        stack.enter_context(place.running("device serve --port 8000 --dir board/device"))
        for command in LIFE:
            place.run(command, FAILS.get(command, 0))
        place.python(
            "import time, urllib.request as web\n"
            "for _ in range(3):\n"
            "    web.urlopen('http://127.0.0.1:8000/predict', open('photo.png', 'rb').read()).read()\n"
            f"    time.sleep({SILENT_S / 3})"
        )
        place.run(f"release agent {good}")
        eventually(lambda: board.updates.state().last.state == "done", "the update")
        place.run("release publish --model cnn-tiny --size 20 --classes cat,dog")
        time.sleep(SILENT_S)
    for command in STOPPED:
        place.run(command, FAILS.get(command, 0))
    assert network.used() - tried == {BROKER, PAGE}
    assert not [*(tmp_path / "home").rglob("*")], "a dependency wrote into the home folder"


def test_other_commands_contact_nothing(tmp_path: Path, network: Network) -> None:
    place = Place(tmp_path, network)
    for command in ALONE:
        run = next((path.name for path in tmp_path.glob("runs/simulate-*")), "")
        place.run(command.format(run=run), FAILS.get(command, 0))
    # `broker config` tries mosquitto on a free port of this machine
    assert not [contact for contact in network.used() if not contact.startswith("tcp 127.0.0.1 ")]
    assert not (tmp_path / "home/.cache/Microsoft").exists(), "onnxruntime's telemetry was on"


def test_downloads_contact_only_the_hosts_that_the_user_asks_for(tmp_path: Path, network: Network) -> None:
    from torchvision.datasets import MNIST

    place = Place(tmp_path, network)
    place.environment["PIP_NO_INDEX"] = "1"
    for command, code in DOWNLOADS.items():
        place.run(command, code)
    hosts = {urlparse(mirror).hostname for mirror in MNIST.mirrors}
    assert {line for line in network.used() if line.startswith("name ")} <= {f"name {host}" for host in hosts}
