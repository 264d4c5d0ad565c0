"""The installation of a flashed card is tried again after every failure and power cut, with and without --offline.

The card's own files run in an aarch64 userland; this test does what systemd does with the unit. The package index is a web server here.
Bookworm and Trixie differ only in what enables the unit, so one test uses one and one the other.
"""

import base64
import configparser
import hashlib
import shutil
import subprocess
import threading
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from edge_fl.cli import cache_folder
from edge_fl_devices.board.installation import INSTALLER, SERVICE
from edge_fl_devices.config import DeviceBroker, DeviceConfig
from edge_fl_devices.flash.bundle import FOLDER
from edge_fl_devices.flash.card_contents import CardContents, with_pi_paths
from edge_fl_devices.flash.changes import INSTALL_SCRIPT, apply_changes, plan_changes
from edge_fl_devices.flash.targets.image import Image
from edge_fl_devices.flash.wheels import Wheelhouse, gather
from tests.arm64 import userland
from tests.arm64.pi import Pi, require
from tests.arm64.test_first_boot import entry, first_boot
from tests.devices.flash import cards

pytestmark = [
    pytest.mark.arm64,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not shutil.which("mformat"), reason="no mtools here"),
]
STEP_S = 300
UNITS = "etc/systemd/system"
TINY = "tiny-1.0-py3-none-any.whl"


class Index:
    """A package index with one wheel, on loopback. It refuses connections until `open`; `fault` is "cut", "stall" or ""."""

    def __init__(self, folder: Path) -> None:
        self.fault, self.stalled, self._go_on = "", threading.Event(), threading.Event()
        index = self

        class Handler(SimpleHTTPRequestHandler):
            def copyfile(self, source: object, out: object) -> None:
                if self.path.endswith(".whl") and index.fault == "stall":
                    index.stalled.set()
                    index._go_on.wait(STEP_S)
                elif self.path.endswith(".whl") and index.fault == "cut":
                    out.write(source.read(100))  # type: ignore[attr-defined]
                else:
                    super().copyfile(source, out)  # type: ignore[misc]

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), partial(Handler, directory=str(folder)), bind_and_activate=False
        )
        self._server.server_bind()
        self.address = f"http://127.0.0.1:{self._server.server_port}/"

    def open(self) -> None:
        self._server.server_activate()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._go_on.set()
        self._server.shutdown()
        self._server.server_close()


def tiny(folder: Path) -> Path:
    """Write a wheel with one module."""
    folder.mkdir(parents=True)
    files = {
        "tiny.py": b"",
        "tiny-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip('=')},{len(content)}\n"
        for name, content in files.items()
    )
    with zipfile.ZipFile(folder / TINY, "w") as wheel:
        for name, content in {**files, "tiny-1.0.dist-info/RECORD": record.encode()}.items():
            wheel.writestr(name, content)
    return folder / TINY


def flashed(folder: Path, system: dict[str, bytes], wheel: Path, *, offline: bool) -> Pi:
    """Return a Pi with a flashed card, whose bundle installs one small package."""
    base = userland.build(userland.BASE)
    python = userland.python(base)
    pip = next(
        file
        for file in gather((python,), cache_folder() / "wheels", offline=True).files
        if file.name.startswith("pip-")
    )
    hashed = f"--hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"
    lines = ["--no-index", f"./wheels/{TINY} {hashed}"] if offline else [f"tiny==1.0 {hashed}"]
    requirements = "\n".join(["--only-binary :all:", "--require-hashes", *lines, ""])
    house = Wheelhouse({python: requirements}, (pip, wheel) if offline else (pip,))
    config = DeviceConfig("pi-07", "folder:/srv/images", broker=DeviceBroker("192.168.1.10"))
    contents = CardContents(with_pi_paths(config, identified=False, root=False), house)
    target = Image(cards.image(folder / "sd.img", system))
    apply_changes(target, *plan_changes(target, lambda pythons: contents))
    return Pi(folder / "sd.img", userland.copy(base, folder / "pi"))


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    index = Index(tiny(tmp_path / "index/tiny").parents[1])
    yield index
    index.close()


def boot_once(pi: Pi, system: dict[str, bytes]) -> None:
    """Run what the card runs at its first boot only."""
    pi.run(*first_boot(pi))
    assert is_enabled(pi, INSTALLER) and not is_enabled(pi, SERVICE)


def is_enabled(pi: Pi, unit: str) -> bool:
    return (pi.root / UNITS / "multi-user.target.wants" / unit).is_file()


def start(pi: Pi) -> int:
    """Start the installation as systemd does; return its exit code."""
    return pi.attempt(*service(pi))


def service(pi: Pi) -> list[str]:
    return entry(pi, INSTALLER, "ExecStart").split()


def log_of(pi: Pi) -> str:
    return (pi.boot / FOLDER / "install.log").read_text()


def final(pi: Pi) -> int:
    """Return the exit code after which systemd does not try again."""
    return int(entry(pi, INSTALLER, "RestartPreventExitStatus"))


def assert_tried_again(pi: Pi, code: int) -> None:
    assert code and code != final(pi), log_of(pi)[-2000:]
    assert entry(pi, INSTALLER, "Restart") == "on-failure"
    assert is_enabled(pi, INSTALLER) and not is_enabled(pi, SERVICE)  # at the next boot, too


def assert_installed(pi: Pi) -> None:
    assert start(pi) == 0, log_of(pi)[-2000:]
    assert is_enabled(pi, SERVICE) and not is_enabled(pi, INSTALLER)
    assert (pi.root / UNITS / INSTALLER).exists()  # systemd would kill the script if it deleted its own unit
    assert list((pi.root / "opt/edge-fl").glob("venv-*/lib/python3*/site-packages/tiny.py"))
    assert not (pi.root / "opt/edge-fl/pip-cache").exists()
    pi.run(*"setpriv --reuid=1000 --regid=1000 --clear-groups mkdir /srv/images/cat".split())


def wait_for(happened: object, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + STEP_S
    while not happened():  # type: ignore[operator]
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.1)


@pytest.mark.nightly
def test_an_installation_over_the_network_is_tried_again(index: Index, tmp_path: Path) -> None:
    require()
    pi = flashed(tmp_path, cards.TRIXIE, tmp_path / "index/tiny" / TINY, offline=False)
    settings = configparser.ConfigParser()
    settings["global"] = {"index-url": index.address, "retries": "0"}  # this test's own server, on loopback
    with (pi.root / "etc/pip.conf").open("w") as file:
        settings.write(file)
    boot_once(pi, cards.TRIXIE)
    (pi.boot / FOLDER / "install.log").write_text("an old line\n" * 50_000)
    assert_tried_again(pi, start(pi))  # no network yet
    index.open()
    index.fault = "cut"
    assert_tried_again(pi, start(pi))  # the connection breaks
    index.fault = "stall"
    with pi.running(*service(pi), log=tmp_path / "a.log") as first:
        wait_for(index.stalled.is_set, first)
        tries = log_of(pi).count("edge-fl: installing")
        with pi.running(*service(pi), log=tmp_path / "b.log"):  # by hand
            time.sleep(3)
            assert log_of(pi).count("edge-fl: installing") == tries
    assert is_enabled(pi, INSTALLER)  # the power was cut
    index.fault = ""
    assert_installed(pi)
    assert 1000 < len(log_of(pi)) < 200_000


def test_an_offline_installation_is_tried_again(tmp_path: Path) -> None:
    require()
    pi = flashed(tmp_path, cards.BOOKWORM, tiny(tmp_path / "wheels"), offline=True)
    boot_once(pi, cards.BOOKWORM)
    on_card = pi.boot / FOLDER / "wheels" / TINY
    on_card.rename(tmp_path / TINY)
    assert_tried_again(pi, start(pi))  # the card could not be read
    shutil.copy(tmp_path / TINY, on_card)
    shutil.rmtree(pi.root / "opt/edge-fl")
    with pi.running(*service(pi), log=tmp_path / "cut.log") as process:
        wait_for(lambda: list((pi.root / "opt/edge-fl").glob("venv-*/bin")), process)
    assert is_enabled(pi, INSTALLER)  # the power was cut
    (pi.boot / FOLDER / "install.log.new").mkdir()  # the log cannot be written
    assert_installed(pi)
    by_hand = ["env", "SUDO_UID=1001", "sh", INSTALL_SCRIPT]
    pi.run("chown", "1002", "/srv/images")
    pi.run(*by_hand)
    assert pi.run("stat", "-c", "%u", "/srv/images") == "1002\n"  # a folder that exists keeps its owner
    pi.run("rm", "-r", "/srv/images")
    pi.run(*by_hand)
    assert pi.run("stat", "-c", "%u", "/srv/images") == "1001\n"


def test_a_damaged_bundle_is_not_tried_again_and_written_anew_by_the_next_flash(tmp_path: Path) -> None:
    require()
    pi = flashed(tmp_path, cards.BOOKWORM, tiny(tmp_path / "wheels"), offline=True)
    boot_once(pi, cards.BOOKWORM)
    (pi.boot / FOLDER / "config.toml").write_text("damaged")
    assert start(pi) == final(pi)
    assert "the bundle is damaged; flash it again" in log_of(pi)
    assert not (pi.boot / FOLDER / "bundle.sha256").exists()
