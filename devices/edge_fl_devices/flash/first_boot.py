"""Edit the boot files of a card so that its first boot runs `edge-fl/install.sh`, in addition to Raspberry Pi Imager's set-up.

On Trixie cloud-init runs the commands in `user-data`. On Bookworm systemd runs the script named in `cmdline.txt`: Imager's
`firstrun.sh`, or ours if there is none. Both happen only once, so they only enable `edge-fl-install.service`, which installs the agent
and is started at every boot until it succeeds. All functions are pure and idempotent.
"""

from __future__ import annotations

import io
import re

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from edge_fl.errors import ConfigError
from edge_fl_devices.flash.templates import INSTALLER

INSTALL_SCRIPT = "/boot/firmware/edge-fl/install.sh"
ENABLE = ["sh", INSTALL_SCRIPT, "--first-boot"]
START = ["systemctl", "start", "--no-block", INSTALLER]
INSTALL_COMMAND = f"{' '.join(ENABLE)} || true"
FIRSTRUN_PATH = "/boot/firmware/firstrun.sh"
KERNEL_OPTIONS = (
    f" systemd.run={FIRSTRUN_PATH} systemd.run_success_action=reboot systemd.unit=kernel-command-line.target"
)
FIRSTRUN = f"""#!/bin/sh
# Started by systemd (see cmdline.txt) at the first boot; removes itself.
{INSTALL_COMMAND}
rm -f {FIRSTRUN_PATH}
sed -i 's|{KERNEL_OPTIONS.replace(".", "[.]")}||' /boot/firmware/cmdline.txt
sync
exit 0
"""
USER_DATA, HEADER = "user-data", "#cloud-config"


def edit_boot_files(
    cmdline: str, firstrun: str | None, user_data: str | None, *, installed: bool
) -> dict[str, str]:
    """Return the new texts by file name, `cmdline.txt` last. Raises ConfigError.

    cloud-init reads `user-data` only at a card's first boot, so an `installed` card gets the script.
    """
    if user_data is not None and not installed:
        return {USER_DATA: add_runcmd(user_data)}
    return {"firstrun.sh": add_install_call(firstrun), "cmdline.txt": add_kernel_options(cmdline)}


def add_kernel_options(cmdline: str) -> str:
    """Add the options that make systemd run the script to the kernel command line, which stays one line."""
    line = " ".join(cmdline.split())
    runs = re.search(r"\bsystemd\.run=(\S+)", line)
    if runs and not runs[1].endswith("/firstrun.sh"):
        raise ConfigError(f"cmdline.txt: runs {runs[1]} already; expected firstrun.sh or nothing")
    return f"{line if runs else line + KERNEL_OPTIONS}\n"


def add_install_call(firstrun: str | None) -> str:
    """Add the call of install.sh to the first-boot script, before the line with which it removes itself."""
    if firstrun is None:
        return FIRSTRUN
    if INSTALL_SCRIPT in firstrun:
        return firstrun
    lines = firstrun.splitlines()
    ends = [number for number, line in enumerate(lines) if re.search(r"\brm\b.*firstrun\.sh\s*$", line)]
    if not firstrun.startswith("#!") or not ends:
        raise ConfigError(
            "firstrun.sh: not written by Raspberry Pi Imager (a script that removes itself at its end); "
            "expected Imager's or none"
        )
    return "\n".join([*lines[: ends[0]], INSTALL_COMMAND, *lines[ends[0] :], ""])


def add_runcmd(user_data: str) -> str:
    """Append install.sh to `runcmd` of cloud-init's user data; everything else stays, including comments."""
    parser = YAML()
    try:
        tree = parser.load(user_data)
    except YAMLError as error:
        raise ConfigError(f"user-data: not YAML ({_brief(error)})") from error
    if user_data.split("\n", 1)[0].rstrip() != HEADER or not isinstance(tree, dict | None):
        raise ConfigError(f"user-data: expected a mapping under the line {HEADER}")
    commands = (tree or {}).get("runcmd")
    if INSTALL_SCRIPT in str(commands):
        return user_data
    if commands is None:
        lines = "".join(f"- [{', '.join(command)}]\n" for command in (ENABLE, START))
        return f"{user_data.rstrip()}\n\nruncmd:\n{lines}"
    if not isinstance(commands, list):
        raise ConfigError("user-data: runcmd is not a list")
    commands += [ENABLE, START]
    text = io.StringIO()
    parser.dump(tree, text)
    return text.getvalue()


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
