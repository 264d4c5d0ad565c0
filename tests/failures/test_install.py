"""Installation on a Raspberry Pi that is interrupted, or gets a bad bundle: the real install.sh, in a folder instead of a system.

The script's absolute paths point into the test's folder, and stubs stand in for the commands that need root or another machine.
"""

import hashlib
import os
import stat
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import pip
import pytest

from edge_fl_devices.config import DeviceBroker, DeviceConfig
from edge_fl_devices.flash.bundle import FOLDER, bundle_files
from edge_fl_devices.flash.card_contents import CardContents, with_pi_paths
from edge_fl_devices.flash.wheels import Wheelhouse

pytestmark = pytest.mark.timeout(600)
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
MAX_COMMANDS = 200
KILLED = -9
PATHS = {
    "opt=/opt/edge-fl": "opt={}/opt",
    "etc=/etc/edge-fl": "etc={}/etc",
    "var=/var/lib/edge-fl": "var={}/var",
    "units=/etc/systemd/system": "units={}/units",
    "images=/srv/images": "images={}/images",
    "/usr/local/bin/edge-fl": "{}/bin/edge-fl",
}
"""What install.sh writes to, and where that is in a test."""
STUB = """#!/bin/sh
if [ "$INTERRUPT" ] && ! printf '%s\\n' "{name} $*" | grep -qxFf "$SITE/interrupted" -; then
  printf '%s\\n' "{name} $*" >>"$SITE/interrupted"
  kill -9 0
fi
{body}
"""
"""With INTERRUPT, kills the whole installation at a command that did not yet kill one."""

STUBS = {
    "dpkg": 'echo "$ARCHITECTURE"',
    "id": "echo 0",
    "df": "echo x x x 9999",
    "systemctl": "true",
    "sync": "true",
    "usermod": "true",
    "python3": f'exec {sys.executable} "$@"',
    "install": 'exec /usr/bin/install $(echo "$@" | sed "s/-[og] edge-fl//g")',
} | {name: f'exec /bin/{name} "$@"' for name in ("cp", "ln", "mkdir", "mv", "rm", "touch")}


@dataclass
class Site:
    """A folder that stands for the file system of a Raspberry Pi."""

    folder: Path
    log: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stubs = self.folder / "stubs"
        stubs.mkdir()
        for name, body in STUBS.items():
            (stubs / name).write_text(STUB.format(name=name, body=body))
            (stubs / name).chmod(0o755)
        (self.folder / "interrupted").touch()
        for name in ("bin", "units"):
            (self.folder / name).mkdir()
        path = f"{stubs}:{os.environ['PATH']}"
        self.environment = {"PATH": path, "SITE": str(self.folder), "ARCHITECTURE": "arm64", "INTERRUPT": ""}

    @property
    def environment_in_use(self) -> Path:
        """The virtual environment that the agent runs from."""
        return (self.folder / "opt/current").resolve(strict=True)

    def install(self, bundle: Path, **environment: str) -> int:
        """Runs the bundle's install.sh -> its exit status; `log` is its install.log, which a very early kill leaves missing."""
        done = subprocess.run(
            ["/bin/sh", str(bundle / "install.sh")],
            env=self.environment | environment,
            capture_output=True,
            start_new_session=True,
            timeout=120,
            check=False,
        )
        log = bundle / "install.log"
        self.log = log.read_text() if log.exists() else ""
        return done.returncode


@pytest.fixture
def site(tmp_path: Path) -> Site:
    (tmp_path / "site").mkdir()
    return Site(tmp_path / "site")


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def wheel(folder: Path, version: str) -> Path:
    about = f"tiny-{version}.dist-info"
    files = {
        "tiny.py": f"VERSION = {version!r}\n".encode(),
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n".encode(),
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"]).encode()
    return zipped(folder / f"tiny-{version}-py3-none-any.whl", files)


def installer(folder: Path) -> Path:
    """The pip of this environment as a wheel."""
    root = Path(pip.__file__).parents[1]
    found = {str(path.relative_to(root)): path for path in (root / "pip").rglob("*") if path.suffix != ".pyc"}
    files = {name: path.read_bytes() for name, path in found.items() if path.is_file()}
    return zipped(folder / f"pip-{pip.__version__}-py3-none-any.whl", files)


def redirected(script: str, folder: Path) -> str:
    """install.sh with every absolute path that it writes to below `folder`."""
    for before, after in PATHS.items():
        assert before in script
        script = script.replace(before, after.format(folder))
    return script


def write_bundle(folder: Path, site: Site, version: str = "1.0") -> Path:
    """A card's folder with the agent's files, one small wheel in the place of all others, and an identity."""
    wheels = folder.with_name(f"{folder.name}-wheels")
    wheels.mkdir()
    tiny = wheel(wheels, version)
    digest = hashlib.sha256(tiny.read_bytes()).hexdigest()
    lines = [
        "--no-index",
        "--only-binary :all:",
        "--require-hashes",
        f"./wheels/{tiny.name} --hash=sha256:{digest}",
    ]
    house = Wheelhouse({PYTHON: "\n".join([*lines, ""])}, (installer(wheels), tiny))
    config = DeviceConfig("pi-07", "folder:/srv/images", broker=DeviceBroker("192.168.1.10", 8883))
    identity = {name: name.encode() for name in ("ca.crt", "client.crt", "client.key")}
    contents = CardContents(with_pi_paths(config, identified=True, root=False), house, identity)
    for file in bundle_files(contents):
        path = folder / file.path.removeprefix(f"{FOLDER}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        content = file.read()
        if path.name == "install.sh":
            content = redirected(content.decode(), site.folder).encode()
        path.write_bytes(content)
    sign(folder)
    return folder


def sign(bundle: Path) -> None:
    """Writes bundle.sha256 for the files as they are."""
    listed = (line.split("  ")[1] for line in (bundle / "bundle.sha256").read_text().splitlines())
    present = [name for name in listed if (bundle / name).exists()]
    lines = [f"{hashlib.sha256((bundle / name).read_bytes()).hexdigest()}  {name}\n" for name in present]
    (bundle / "bundle.sha256").write_text("".join(lines))


def installed_version(site: Site) -> str:
    command = [site.environment_in_use / "bin/python", "-c", "import tiny; print(tiny.VERSION)"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_row_29_an_interrupted_installation_is_completed_by_the_next(site: Site, tmp_path: Path) -> None:
    """Killed once at each of its commands, one installation after the other, until one reaches its end."""
    bundle = write_bundle(tmp_path / "card", site)
    kills = 0
    while (status := site.install(bundle, INTERRUPT="yes")) == KILLED and kills < MAX_COMMANDS:
        kills += 1
        current = site.folder / "opt/current"
        assert not current.is_symlink() or (site.environment_in_use / "complete").exists()
    killed_at = {line.split()[0] for line in (site.folder / "interrupted").read_text().splitlines()}
    assert status == 0 and kills > len(STUBS), site.log
    assert killed_at >= {"python3", "touch", "ln", "mv", "install", "cp", "rm"}
    assert site.log.endswith("edge-fl: install rc=0\n")
    assert installed_version(site) == "1.0"
    key = site.folder / "etc/identity/client.key"
    assert key.read_bytes() == b"client.key" and stat.S_IMODE(key.stat().st_mode) == 0o600
    assert not (bundle / "identity").exists()
    assert (site.folder / "units/multi-user.target.wants/edge-fl.service").resolve(strict=True)


def wrong_byte(bundle: Path) -> None:
    (found,) = (bundle / "wheels").glob("tiny-*.whl")
    found.write_bytes(found.read_bytes()[:-1] + b"x")


def wrong_hash(bundle: Path) -> None:
    wrong_byte(bundle)
    sign(bundle)


def missing_wheel(bundle: Path) -> None:
    next((bundle / "wheels").glob("tiny-*.whl")).unlink()


@pytest.mark.parametrize(
    ("spoil", "architecture", "named"),
    [
        (wrong_byte, "arm64", "tiny-2.0-py3-none-any.whl: FAILED"),
        (wrong_hash, "arm64", "tiny-2.0-py3-none-any.whl"),
        (missing_wheel, "arm64", "tiny-2.0-py3-none-any.whl"),
        (lambda bundle: None, "armhf", "armhf"),
    ],
    ids=["damaged", "hash", "missing", "architecture"],
)
def test_row_31_a_bad_bundle_is_named_and_the_old_installation_stays(
    site: Site, tmp_path: Path, spoil, architecture: str, named: str
) -> None:
    assert site.install(write_bundle(tmp_path / "old", site)) == 0, site.log
    before = site.environment_in_use
    bundle = write_bundle(tmp_path / "new", site, "2.0")
    spoil(bundle)
    assert site.install(bundle, ARCHITECTURE=architecture) not in (0, KILLED)
    assert named in site.log and not site.log.endswith("rc=0\n")
    assert site.environment_in_use == before and installed_version(site) == "1.0"
