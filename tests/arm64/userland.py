"""A Debian userland for aarch64, unpacked from packages without running installation scripts, which takes only seconds.

apt works in a folder of its own and takes everything from this machine's own sources. What the scripts would have done and a test
needs (users, links, a clock-less machine id) is done here in a few lines.
"""

import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from edge_fl.cli import cache_folder

VERSION = "1"  # increase it to rebuild every userland
BASE = (
    "base-files base-passwd bash coreutils dash debianutils dpkg findutils grep gzip hostname init-system-helpers libc-bin "
    "libstdc++6 login mawk mount passwd procps python3-venv sed tar util-linux"
).split()
SYSTEM = "iproute2 kmod libpam-modules libpam-runtime linux-image-cloud-arm64 systemd systemd-sysv udev busybox-static".split()
QEMU = "qemu-aarch64-static"
CPU = "cortex-a72"  # a Pi 4; the default, "max", has vector units that make numpy warn
CORES = 4
CPUINFO = "".join(
    f"processor\t: {core}\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd evtstrm crc32 cpuid\nCPU implementer\t: 0x41\n"
    f"CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: 0xd08\nCPU revision\t: 3\n\n"
    for core in range(CORES)
)
APT_S, UNPACK_S = 300, 120


def build(packages: Sequence[str]) -> Path:
    """Return the root of a userland with these packages and their dependencies, built once. Skips where it cannot be built."""
    for program in (QEMU, "apt-get", "dpkg-deb"):
        shutil.which(program) or pytest.skip(f"no {program} here")
    release = _release()
    key = hashlib.sha256(f"{VERSION} {release} {' '.join(packages)}".encode()).hexdigest()[:12]
    root = cache_folder() / "arm64" / f"{release}-{key}"
    complete = root.with_name(f"{root.name}.complete")
    root.parent.mkdir(parents=True, exist_ok=True)
    with (root.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # only one test process builds
        if not complete.exists():
            shutil.rmtree(root, ignore_errors=True)
            _unpack(_download(packages, root.parent / "apt"), root)
            _complete(root)
            complete.touch()
    return root


def copy(root: Path, to: Path) -> Path:
    """Return a writable copy."""
    subprocess.run(["cp", "-a", "--reflink=auto", str(root), str(to)], check=True, timeout=UNPACK_S)
    return to


def python(root: Path) -> str:
    """Return its Python version, for example "3.11"."""
    return str((root / "usr/bin/python3").readlink()).removeprefix("python")


def _release() -> str:
    found = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line
    )
    if found.get("ID") != "debian":
        pytest.skip("no Debian here, whose sources also have aarch64")
    return found["VERSION_CODENAME"]


def _download(packages: Sequence[str], state: Path) -> list[Path]:
    for folder in ("lists/partial", "archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    options = {
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::State::lists": state / "lists",
        "Dir::Cache": state,
        "Dir::Cache::archives": state / "archives",
        "APT::Architecture": "arm64",
        "APT::Architectures::": "arm64",
        "APT::Install-Recommends": "0",
        "APT::Sandbox::User": "root",
        "Acquire::Retries": "3",
    }
    apt = ["apt-get", "-q", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
    subprocess.run([*apt, "update"], check=True, timeout=APT_S, capture_output=True)
    install = [*apt, "install", "-y", "--download-only"]
    subprocess.run([*install, *packages], check=True, timeout=APT_S, capture_output=True)
    wanted = subprocess.run(
        [*apt, "install", "-y", "-s", *packages], check=True, timeout=APT_S, capture_output=True, text=True
    )
    names = {line.split()[1] for line in wanted.stdout.splitlines() if line.startswith("Inst ")}
    return [deb for deb in sorted((state / "archives").glob("*.deb")) if deb.name.split("_")[0] in names]


def _unpack(packages: Sequence[Path], root: Path) -> None:
    for name in ("bin", "sbin", "lib"):
        # merged /usr, as in Debian since 12; before the first package creates these folders
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for package in packages:
        with subprocess.Popen(
            ["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE
        ) as archive:
            tar = ["tar", "-x", "-C", str(root), "--keep-directory-symlink", "--same-permissions"]
            subprocess.run(tar, stdin=archive.stdout, check=True, timeout=UNPACK_S)


def _complete(root: Path) -> None:
    for name in ("passwd", "group"):
        shutil.copyfile(root / f"usr/share/base-passwd/{name}.master", root / "etc" / name)
    (root / "etc/shadow").write_text("root:*:19000:0:99999:7:::\n")
    (root / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    (root / "etc/hostname").write_text("pi-07\n")
    (root / "etc/hosts").write_text("127.0.0.1 localhost pi-07\n")
    (root / "etc/ld.so.cache").unlink(missing_ok=True)
    if not (root / "usr/bin/awk").exists():
        (root / "usr/bin/awk").symlink_to("mawk")
    for folder in (
        "boot/firmware",
        "proc",
        "sys",
        "dev",
        "run",
        "tmp",
        "srv",
        "usr/local/bin",
        "var/lib/dpkg",
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "var/lib/dpkg/status").touch()
    (root / "var/lib/dpkg/arch").write_text("arm64\n")
    (root / "tmp").chmod(0o1777)
    (root / "etc/cpuinfo").write_text(CPUINFO)
