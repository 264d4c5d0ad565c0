"""Cards for the flash tests: the boot partition of Raspberry Pi OS, as a folder or as an image with a FAT partition."""

import struct
import subprocess
from pathlib import Path

CMDLINE = "console=serial0,115200 console=tty1 root=PARTUUID=1234-02 rootfstype=ext4 fsck.repair=yes rootwait"
BOOKWORM = {
    "config.txt": b"# For more options see the documentation\narm_64bit=1\n",
    "cmdline.txt": f"{CMDLINE}\n".encode(),
    "issue.txt": b"Raspberry Pi reference 2025-05-13\nGenerated using pi-gen, stage2\n",
    "kernel8.img": b"kernel",
    "kernel_2712.img": b"kernel",
}
TRIXIE = BOOKWORM | {
    "issue.txt": b"Raspberry Pi reference 2025-11-24\nGenerated using pi-gen, stage2\n",
    "cmdline.txt": f"{CMDLINE} ds=nocloud;i=rpi-1\n".encode(),
    "user-data": b"""#cloud-config
# Set by Raspberry Pi Imager
hostname: pi-07
ssh_pwauth: "no"  # a word, not a boolean
keyboard: {layout: 'no', model: "on"}
bootcmd:
  - [ "at", "12:30", 'yes' ]
packages: [ ]
""",
    "meta-data": b"instance-id: rpi-1\ndsmode: local\n",
    "network-config": b"version: 2\nwifis:\n  wlan0:\n    access-points: {\"on\": {password: '12:30'}}\n",
}
CLOUD_INIT = ("user-data", "meta-data", "network-config")
ARMHF = BOOKWORM | {"kernel7.img": b"kernel", "kernel7l.img": b"kernel"}
START = 8192  # sectors; the first partition of the published images begins at 8 MiB or, as here, at 4 MiB
SECTOR = 512


def folder(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def table(*parts: tuple[int, int, int]) -> bytes:
    """A master boot record with these partitions: (type, first sector, sectors)."""
    entries = b"".join(struct.pack("<B3xB3xII", 0, kind, first, count) for kind, first, count in parts)
    return entries.rjust(446 + len(entries), b"\0").ljust(510, b"\0") + b"\x55\xaa"


def image(path: Path, files: dict[str, bytes], mebibytes: int = 40) -> Path:
    """An image with one FAT32 partition and these files in it."""
    sectors = mebibytes * 2048
    with path.open("wb") as file:
        file.write(table((0x0C, START, sectors)))
        file.truncate((START + sectors) * SECTOR)
    mtools(path, "mformat", "-F", "-T", str(sectors), "-v", "bootfs", "::")
    for name, content in files.items():
        mtools(path, "mcopy", "-", f"::/{name}", input=content)
    return path


def mtools(path: Path, program: str, *arguments: str, input: bytes = b"") -> bytes:
    command = [program, "-i", f"{path}@@{START * SECTOR}", *arguments]
    return subprocess.run(command, input=input, check=True, capture_output=True, timeout=60).stdout
