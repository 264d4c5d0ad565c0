"""Each kind of unusable card is rejected with its own message before anything is written; a usable one is written once."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_fl.errors import ConfigError
from edge_fl_devices.flash.bundle import LOG, MANIFEST
from edge_fl_devices.flash.card_contents import CardContents
from edge_fl_devices.flash.changes import KERNEL_OPTIONS, apply_changes, list_changes, plan_changes
from edge_fl_devices.flash.targets.base import Target
from edge_fl_devices.flash.targets.folder import BootFolder, OutFolder
from edge_fl_devices.flash.targets.image import Image, check_removable
from tests.devices.flash import cards

MakeContents = Callable[[tuple[str, ...]], CardContents]
MakeCard = Callable[[dict[str, bytes]], Target]


@pytest.fixture(params=["folder", "image"])
def card(request: pytest.FixtureRequest, tmp_path: Path) -> MakeCard:
    """A card with these files on it, mounted or as an image."""
    if request.param == "image":
        pytest.importorskip("shutil").which("mformat") or pytest.skip("no mtools here")
        return lambda files: Image(cards.image(tmp_path / "sd.img", files))
    return lambda files: BootFolder(cards.folder(tmp_path / "bootfs", files))


def flash(target: Target, contents: MakeContents) -> list[str]:
    new, old = plan_changes(target, contents)
    apply_changes(target, new, old)
    return [str(change["path"]) for change in list_changes(new, old)]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"a.txt": b"hello"}, "not a Raspberry Pi OS boot partition"),
        ({"config.txt": b"", "cmdline.txt": b""}, r"boot partition \(issue.txt missing\)"),
        (cards.ARMHF, r"32-bit Raspberry Pi OS \(kernel7.img\)"),
        (
            cards.BOOKWORM | {"issue.txt": b"Raspberry Pi reference 2023-05-03"},
            "of 2023-05-03; expected Bookworm",
        ),
        (cards.BOOKWORM | {"issue.txt": b"Raspberry Pi"}, "of an unknown date"),
        (cards.BOOKWORM | {"firstrun.sh": b"#!/bin/sh\n"}, "firstrun.sh: not written by"),
        (cards.BOOKWORM | {"cmdline.txt": b"\xff\xfe"}, "cmdline.txt: not UTF-8"),
    ],
)
def test_what_is_no_card_for_us_is_rejected(
    card: MakeCard, contents: MakeContents, files: dict[str, bytes], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        plan_changes(card(files), contents)


def test_bookworm_installs_through_its_kernel_command_line(card: MakeCard, contents: MakeContents) -> None:
    bookworm = card(cards.BOOKWORM)
    written = flash(bookworm, contents)
    assert written[-2:] == ["firstrun.sh", "cmdline.txt"] and "edge-fl/requirements-3.11.txt" in written
    assert bookworm.read("cmdline.txt") == f"{cards.CMDLINE}{KERNEL_OPTIONS}\n".encode()
    assert bookworm.read("edge-fl/wheels/tiny-1.0-py3-none-any.whl") == b"a wheel"


@pytest.mark.parametrize("flashed_before", [False, True])
def test_trixie_installs_through_its_kernel_command_line_whether_it_has_booted_or_not(
    card: MakeCard, contents: MakeContents, flashed_before: bool
) -> None:
    """cloud-init reads user-data once for each instance-id: a card that has booted shows nothing of it on its boot partition."""
    files = dict(cards.TRIXIE)
    if flashed_before:  # by a version that changed user-data, after the first boot: nothing happened
        files["user-data"] += b"\nruncmd:\n- [sh, /boot/firmware/edge-fl/install.sh, --first-boot]\n"
    trixie = card(files)
    written = flash(trixie, contents)
    assert written[-2:] == ["firstrun.sh", "cmdline.txt"]
    line = (trixie.read("cmdline.txt") or b"").decode()
    assert (
        line == files["cmdline.txt"].decode().strip() + KERNEL_OPTIONS + "\n" and "ds=nocloud;i=rpi-1" in line
    )
    assert "edge-fl/requirements-3.13.txt" in written and "edge-fl/requirements-3.11.txt" not in written
    for name in cards.CLOUD_INIT:  # no value in them can change, and no password or host key be set again
        assert trixie.read(name) == files[name]


def test_a_card_of_either_release_gets_both_pythons(card: MakeCard, contents: MakeContents) -> None:
    late = card(cards.BOOKWORM | {"issue.txt": b"Raspberry Pi reference 2026-01-10"})
    assert late.pythons() == ("3.11", "3.13")


def test_the_second_flash_changes_nothing(card: MakeCard, contents: MakeContents) -> None:
    target = card(cards.BOOKWORM)
    assert len(flash(target, contents)) > 8
    assert flash(target, contents) == []


def test_a_flash_that_was_cut_off_is_done_again(card: MakeCard, contents: MakeContents) -> None:
    target = card(cards.BOOKWORM)
    new, old = plan_changes(target, contents)
    apply_changes(target, new[:4], old)
    assert len(flash(target, contents)) == len(new)


def test_a_card_that_has_booted_is_left_alone_until_something_is_new(
    card: MakeCard, contents: MakeContents
) -> None:
    target = card(cards.TRIXIE)
    new, old = plan_changes(target, contents)
    apply_changes(target, new, old)
    file = type(new[0])
    target.write([file(LOG, b"installed"), file("cmdline.txt", cards.TRIXIE["cmdline.txt"])])
    target.remove(["firstrun.sh", "edge-fl/identity/client.key"])  # as the script and the installation do
    assert flash(target, contents) == []
    both = flash(target, lambda pythons: contents(("3.11", *pythons)))
    assert both == ["edge-fl/requirements-3.11.txt", MANIFEST, "firstrun.sh", "cmdline.txt"]


def test_what_a_newer_bundle_has_no_more_is_removed(card: MakeCard, contents: MakeContents) -> None:
    target = card(cards.BOOKWORM)
    flash(target, lambda pythons: contents(("3.11", "3.13")))
    flash(target, contents)
    assert target.read("edge-fl/requirements-3.13.txt") is None


def test_too_little_space_is_rejected(contents: MakeContents, tmp_path: Path) -> None:
    pytest.importorskip("shutil").which("mformat") or pytest.skip("no mtools here")
    files = cards.BOOKWORM | {"kernel8.img": bytes(35 << 20)}
    with pytest.raises(ConfigError, match=r"\d MB are free; expected \d+ MB"):
        plan_changes(Image(cards.image(tmp_path / "sd.img", files)), contents)


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 4096, cards.table(), cards.table((0x83, 2048, 100)), b"PK\3\4" + b"x" * 4096]
)
def test_an_image_of_something_else_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.img").write_bytes(content)
    with pytest.raises(ConfigError, match="not an image of a card"):
        Image(tmp_path / "x.img")


def disk(sys: Path, number: int, removable: str, kind: str = "", part: bool = False) -> None:
    """A block device as the kernel shows it under /sys/dev/block."""
    device = sys / "devices" / "sda"
    (device / "device").mkdir(parents=True, exist_ok=True)
    (device / "removable").write_text(f"{removable}\n")
    (device / "device" / "type").write_text(f"{kind}\n")
    if part:
        device = device / "sda1"
        device.mkdir()
        (device / "partition").write_text("1\n")
    (sys / f"{os.major(number)}:{os.minor(number)}").symlink_to(device)


def a_device() -> Path:
    return Path(
        "/dev/null"
    )  # not a block device, but it has a device number; the fake /sys describes the disk


@pytest.mark.parametrize("part", [False, True])
def test_a_disk_that_is_not_removable_is_rejected(tmp_path: Path, part: bool) -> None:
    disk(tmp_path, a_device().stat().st_rdev, "0", part=part)
    with pytest.raises(ConfigError, match="a disk that is not removable"):
        check_removable(a_device(), tmp_path, tmp_path / "mounts")


@pytest.mark.parametrize(("removable", "kind"), [("1", ""), ("0", "SD")])
def test_a_card_is_taken_unless_it_is_mounted(tmp_path: Path, removable: str, kind: str) -> None:
    disk(tmp_path, a_device().stat().st_rdev, removable, kind)
    (tmp_path / "mounts").write_text("/dev/vda1 / ext4 rw 0 0\n")
    check_removable(a_device(), tmp_path, tmp_path / "mounts")
    (tmp_path / "mounts").write_text("/dev/sda1 /media/me/bootfs vfat rw 0 0\n")
    with pytest.raises(ConfigError, match=r"/dev/sda1 is mounted at /media/me/bootfs; give that folder"):
        check_removable(a_device(), tmp_path, tmp_path / "mounts")


def test_the_disk_of_this_computer_is_rejected() -> None:
    disks = [
        path
        for path in Path("/dev").glob("*")
        if path.is_block_device() and path.name.startswith(("vd", "nvme"))
    ]
    if not disks:
        pytest.skip("no fixed disk here")
    assert stat.S_ISBLK(disks[0].stat().st_mode)
    with pytest.raises(ConfigError, match="a disk that is not removable"):
        Image(disks[0])


READ_ONLY = """
set -e
mount -t tmpfs tmpfs "$1"; cp -r "$2" "$1/card"; mount -o remount,ro "$1"
"$3" -m edge_fl flash --id pi-07 --host 192.168.1.10 --insecure --wheels "$4" --boot "$1/card" 2>&1
"""


@pytest.mark.parametrize("kind", ["folder", "image"])
def test_a_read_only_card_is_rejected(tmp_path: Path, wheels: Path, kind: str) -> None:
    source = (
        cards.folder(tmp_path / "a", cards.BOOKWORM)
        if kind == "folder"
        else cards.image(tmp_path / "a.img", cards.BOOKWORM)
    )
    apart = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here")
    (tmp_path / "mnt").mkdir()
    arguments = (tmp_path / "mnt", source, sys.executable, wheels)
    command = [*apart, "sh", "-c", READ_ONLY, "sh", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 4 and "is read-only" in done.stdout and "nothing was written" in done.stdout


def test_a_plain_folder_takes_the_bundle_for_carrying(contents: MakeContents, tmp_path: Path) -> None:
    target = OutFolder(tmp_path / "out", ("3.11", "3.13"))
    written = flash(target, contents)
    assert "cmdline.txt" not in written and MANIFEST in written
    assert stat.S_IMODE((tmp_path / "out/edge-fl/identity/client.key").stat().st_mode) == 0o600
    assert flash(target, contents) == []
