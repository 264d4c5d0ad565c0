"""Edits of the boot files keep one line, keep what Imager wrote, and are idempotent."""

from __future__ import annotations

import pytest
from ruamel.yaml import YAML

from edge_fl.errors import ConfigError
from edge_fl_devices.flash.first_boot import (
    ENABLE,
    FIRSTRUN,
    FIRSTRUN_PATH,
    INSTALL_COMMAND,
    INSTALL_SCRIPT,
    KERNEL_OPTIONS,
    START,
    add_install_call,
    add_kernel_options,
    add_runcmd,
    edit_boot_files,
)
from tests.devices.flash.cards import CMDLINE

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


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("#cloud-config\n", [ENABLE, START]),
        ("#cloud-config\n# only\n# comments\n", [ENABLE, START]),
        ("#cloud-config\nhostname: pi-07\nssh_pwauth: false # as it was\n", [ENABLE, START]),
        ("#cloud-config\nruncmd:\n- [ls, -l]\n# the end\n", [["ls", "-l"], ENABLE, START]),
        ("#cloud-config\nruncmd: []\nhostname: pi-07\n", [ENABLE, START]),
    ],
)
def test_cloud_init_enables_and_starts_the_installation_and_keeps_the_rest(
    before: str, expected: list[list[str]]
) -> None:
    edited = add_runcmd(before)
    tree = YAML(typ="safe").load(edited)
    assert tree.pop("runcmd") == expected
    assert tree == {k: v for k, v in (YAML(typ="safe").load(before) or {}).items() if k != "runcmd"}
    assert edited.startswith("#cloud-config\n")
    assert [line for line in before.splitlines() if "#" in line and line not in edited] == []
    assert add_runcmd(edited) == edited


@pytest.mark.parametrize(
    ("strange", "why"),
    [
        ("hostname: pi-07\n", "under the line #cloud-config"),
        ("#cloud-config\n- a list\n", "expected a mapping"),
        ("#cloud-config\nruncmd: ls\n", "runcmd is not a list"),
        ("#cloud-config\na: b: c\n", "not YAML"),
        ("#!/bin/sh\n", "expected a mapping"),
    ],
)
def test_user_data_that_are_not_cloud_inits_are_rejected(strange: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        add_runcmd(strange)


def test_cloud_init_runs_once_and_a_booted_card_gets_the_script() -> None:
    assert list(edit_boot_files(CMDLINE, None, "#cloud-config\n", installed=False)) == ["user-data"]
    assert list(edit_boot_files(CMDLINE, None, "#cloud-config\n", installed=True)) == [
        "firstrun.sh",
        "cmdline.txt",
    ]
    assert list(edit_boot_files(CMDLINE, None, None, installed=False)) == ["firstrun.sh", "cmdline.txt"]
