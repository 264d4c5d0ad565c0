"""Edits of the boot files keep one line, keep what Imager wrote, and are idempotent."""

import subprocess
from pathlib import Path

import pytest

from edge_fl.errors import ConfigError
from edge_fl_devices.flash.changes import (
    FIRSTRUN,
    FIRSTRUN_PATH,
    INSTALL_COMMAND,
    INSTALL_SCRIPT,
    KERNEL_OPTIONS,
    add_install_call,
    add_kernel_options,
)
from tests.devices.flash.cards import CMDLINE

GENERATOR = Path("/lib/systemd/system-generators/systemd-run-generator")
IMAGER = """#!/bin/bash

set +e

CURRENT_HOSTNAME=$(cat /etc/hostname | tr -d " ")
echo pi-07 >/etc/hostname
rm -f /boot/firstrun.sh
sed -i 's| systemd.run.*||g' /boot/cmdline.txt
exit 0
"""
IMAGERS_OPTIONS = (
    " systemd.run=/boot/firstrun.sh systemd.run_success_action=reboot systemd.unit=kernel-command-line.target"
)


@pytest.mark.parametrize("end", ["", "\n", "\n\n", " \r\n"])
def test_the_command_line_stays_one_line_and_is_edited_once(end: str) -> None:
    edited = add_kernel_options(CMDLINE + end)
    assert edited == f"{CMDLINE}{KERNEL_OPTIONS}\n"
    assert add_kernel_options(edited) == edited


def test_kernel_options_written_by_imager_are_kept() -> None:
    assert add_kernel_options(CMDLINE + IMAGERS_OPTIONS) == f"{CMDLINE}{IMAGERS_OPTIONS}\n"


def test_a_command_line_that_runs_something_else_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"runs /usr/local/bin/mine\.sh already"):
        add_kernel_options(f"{CMDLINE} systemd.run=/usr/local/bin/mine.sh")


def test_our_script_removes_itself_and_only_our_kernel_options() -> None:
    lines = FIRSTRUN.splitlines()
    assert lines[0] == "#!/bin/sh" and lines.index(INSTALL_COMMAND) < lines.index(f"rm -f {FIRSTRUN_PATH}")
    assert KERNEL_OPTIONS.replace(".", "[.]") in FIRSTRUN and "systemd\\." not in FIRSTRUN


def test_imagers_script_calls_ours_before_it_removes_itself() -> None:
    edited = add_install_call(IMAGER)
    assert edited.replace(f"{INSTALL_COMMAND}\n", "") == IMAGER
    assert edited.index(INSTALL_SCRIPT) < edited.index("rm -f /boot/firstrun.sh")
    assert add_install_call(edited) == edited


@pytest.mark.parametrize("strange", ["echo hello\n", "#!/bin/sh\necho hello\n"])
def test_a_script_that_imager_did_not_write_is_rejected(strange: str) -> None:
    with pytest.raises(ConfigError, match=r"firstrun\.sh: not written by Raspberry Pi Imager"):
        add_install_call(strange)


@pytest.mark.skipif(not GENERATOR.exists(), reason="no systemd here")
def test_systemd_makes_a_unit_of_the_command_line_that_runs_the_script_and_boots_again(
    tmp_path: Path,
) -> None:
    folders = [tmp_path / name for name in ("normal", "early", "late")]
    for folder in folders:
        folder.mkdir()
    cmdline = add_kernel_options(f"{CMDLINE} ds=nocloud;i=rpi-imager-1764000000").strip()
    subprocess.run(
        [GENERATOR, *folders], env={"SYSTEMD_PROC_CMDLINE": cmdline}, check=True, capture_output=True
    )
    unit = (folders[0] / "kernel-command-line.service").read_text()
    assert f"ExecStart={FIRSTRUN_PATH}\n" in unit and "SuccessAction=reboot\n" in unit
    target = (
        folders[0] / "default.target"
    ).resolve()  # instead of multi-user.target, which starts cloud-init
    assert target.name == "kernel-command-line.target"
    requires = [line for line in target.read_text().splitlines() if line.startswith("Requires=")]
    assert requires == ["Requires=kernel-command-line.service"]
