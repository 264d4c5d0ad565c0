"""An emulated aarch64 computer: a card with boot and root partition, a Debian kernel, systemd, and simulated power cuts."""

import gzip
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.arm64 import userland
from tests.devices.flash import cards

QEMU = "qemu-system-aarch64"
BOOT_MIB, ROOT_MIB = 192, 2048
HOST = "10.0.2.2"  # address of the host's loopback inside the machine
MODULES = ("virtio_pci", "virtio_blk")
UNITS = {
    # replaces NetworkManager
    "wired.service": """[Unit]
Before=network-online.target
Wants=network-online.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'until [ -e /sys/class/net/eth0 ]; do sleep 1; done; ip link set eth0 up && ip address add 10.0.2.15/24 dev eth0'
[Install]
WantedBy=multi-user.target
"""
}
FSTAB = "/dev/vda2 / ext4 rw 0 0\n/dev/vda1 /boot/firmware vfat rw 0 0\n"
INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
for module in /modules/*; do /bin/busybox insmod $module; done
for try in 1 2 3 4 5 6 7 8 9 10; do [ -b /dev/vda2 ] && break; /bin/busybox sleep 1; done
/bin/busybox mount -t ext4 /dev/vda2 /root
exec /bin/busybox switch_root /root /sbin/init
"""


class Machine:
    """Files of the machine are in `folder`; `card` is the image of its card, whose first partition contains `files`."""

    def __init__(self, folder: Path, files: dict[str, bytes]) -> None:
        for program in (QEMU, "mke2fs", "depmod", "mformat"):
            shutil.which(program) or pytest.skip(f"no {program} here")
        folder.mkdir()
        self.folder, self.card = folder, folder / "sd.img"
        root = userland.copy(userland.build([*userland.BASE, *userland.SYSTEM]), folder / "root")
        self._kernel = next(root.glob("boot/vmlinuz-*")).rename(folder / "vmlinuz")
        _complete(root)
        self._ramdisk = folder / "ramdisk"
        self._ramdisk.write_bytes(_ramdisk(root))
        _write_card(self.card, files, root)
        shutil.rmtree(root)

    @contextmanager
    def powered(self, name: str) -> Iterator[subprocess.Popen[bytes]]:
        """Power on with the card's current kernel command line, as the Pi's firmware does; cut the power at the end of the block."""
        words = cards.mtools(self.card, "mtype", "::/cmdline.txt").decode().strip()
        command = [
            QEMU,
            "-M",
            "virt",
            "-cpu",
            userland.CPU,
            "-smp",
            "2",
            "-m",
            "1024",
            "-nographic",
            "-no-reboot",
        ]
        command += ["-kernel", str(self._kernel), "-initrd", str(self._ramdisk)]
        command += ["-append", f"{words} console=ttyAMA0 net.ifnames=0 systemd.show_status=1"]
        command += ["-drive", f"file={self.card},format=raw,if=virtio", "-device", "virtio-rng-pci"]
        command += ["-netdev", "user,id=n0", "-device", "virtio-net-pci,netdev=n0,romfile="]
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                yield process
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait(30)

    def boot_until_reboot(self, name: str, deadline_s: float) -> float:
        """Power on, wait until the machine powers off, and return the seconds."""
        began_s = time.monotonic()
        with self.powered(name) as process:
            try:
                process.wait(deadline_s)
            except subprocess.TimeoutExpired as error:
                raise AssertionError(f"no reboot after {deadline_s} s\n{self.console_tail(name)}") from error
        return time.monotonic() - began_s

    def console_tail(self, name: str) -> str:
        """Return the end of the console output."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]


def _complete(root: Path) -> None:
    """Set up what installation scripts and Raspberry Pi OS would."""
    (root / "etc/fstab").write_text(FSTAB)
    (root / "etc/cpuinfo").unlink()
    wanted = root / "etc/systemd/system/multi-user.target.wants"
    wanted.mkdir(parents=True, exist_ok=True)
    for name, text in UNITS.items():
        (wanted.parent / name).write_text(text)
        (wanted / name).symlink_to(f"../{name}")
    (wanted.parent / "getty.target").symlink_to("/dev/null")
    (wanted.parent / "default.target").symlink_to("/lib/systemd/system/multi-user.target")
    (root / "usr/lib/clock-epoch").touch()  # systemd's clock starts at this file's time
    subprocess.run(["depmod", "-b", str(root), _version(root)], check=True, timeout=120)


def _version(root: Path) -> str:
    return next((root / "lib/modules").iterdir()).name


def _write_card(card: Path, files: dict[str, bytes], root: Path) -> None:
    cards.image(card, files, BOOT_MIB)
    start, sectors = cards.START + BOOT_MIB * 2048, ROOT_MIB * 2048
    with card.open("r+b") as image:
        image.write(cards.table((0x0C, cards.START, BOOT_MIB * 2048), (0x83, start, sectors)))
        image.truncate((start + sectors) * cards.SECTOR)
    offset = f"offset={start * cards.SECTOR}"
    mke2fs = ["mke2fs", "-q", "-t", "ext4", "-d", str(root), "-E", offset, str(card), f"{ROOT_MIB}M"]
    subprocess.run(mke2fs, check=True, timeout=300)


def _ramdisk(root: Path) -> bytes:
    """Build the initial RAM disk: busybox, disk modules and a script."""
    modules = root / "lib/modules" / _version(root)
    lines = (line.split(":") for line in (modules / "modules.dep").read_text().splitlines())
    needs = {Path(path).name.partition(".")[0]: (path, after.split()) for path, after in lines}
    order: list[str] = []
    for name in MODULES:
        path, after = needs[name]
        order += [module for module in [*reversed(after), path] if module not in order]
    entries = [
        ("bin", b"", 0o40755),
        ("dev", b"", 0o40755),
        ("root", b"", 0o40755),
        ("modules", b"", 0o40755),
    ]
    entries += [
        ("init", INIT.encode(), 0o100755),
        ("bin/busybox", (root / "bin/busybox").read_bytes(), 0o100755),
    ]
    entries += [
        (f"modules/{number:02d}.ko", (modules / path).read_bytes(), 0o100644)
        for number, path in enumerate(order)
    ]
    return gzip.compress(b"".join(_cpio(*entry) for entry in [*entries, ("TRAILER!!!", b"", 0)]), 1)


def _cpio(name: str, content: bytes, mode: int) -> bytes:
    """Return one entry of a cpio archive in the format "newc"."""
    numbers = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % number for number in numbers) + name.encode() + b"\0"
    return _even(head) + _even(content)


def _even(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
