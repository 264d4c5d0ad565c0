"""Edit the boot files of a card so that its next boot runs `edge-fl/install.sh`, in addition to Raspberry Pi Imager's set-up.

systemd runs the script named in `cmdline.txt`: Imager's `firstrun.sh`, or ours if there is none. It only enables
`edge-fl-install.service`, which installs the agent and is started at every boot until it succeeds. All functions are pure and idempotent.

The files of cloud-init (Trixie) are left alone. It runs the commands in `user-data` once for each `instance-id`, so a card that has booted
before would never run ours; and under a new `instance-id` it would set passwords and host keys anew. systemd reads `cmdline.txt` at
every boot, and starts nothing of cloud-init in the one that runs the script: a new card is set up in the boot after it.
"""

import re

from edge_fl.errors import ConfigError

INSTALL_SCRIPT = "/boot/firmware/edge-fl/install.sh"
INSTALL_COMMAND = f"sh {INSTALL_SCRIPT} --first-boot || true"
FIRSTRUN_PATH = "/boot/firmware/firstrun.sh"
KERNEL_OPTIONS = (
    f" systemd.run={FIRSTRUN_PATH} systemd.run_success_action=reboot systemd.unit=kernel-command-line.target"
)
FIRSTRUN = f"""#!/bin/sh
# Started by systemd (see cmdline.txt) at the next boot; removes itself.
{INSTALL_COMMAND}
rm -f {FIRSTRUN_PATH}
sed -i 's|{KERNEL_OPTIONS.replace(".", "[.]")}||' /boot/firmware/cmdline.txt
sync
exit 0
"""


def edit_boot_files(cmdline: str, firstrun: str | None) -> dict[str, str]:
    """Return the new texts by file name, `cmdline.txt` last. Raises ConfigError."""
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
