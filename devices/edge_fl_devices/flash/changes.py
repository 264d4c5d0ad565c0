"""Compare a target with the planned bundle, check the space, and write the difference; the boot files are written last.

The boot files are edited so that the next boot runs `edge-fl/install.sh`, in addition to Raspberry Pi Imager's set-up: systemd runs the
script named in `cmdline.txt`, Imager's `firstrun.sh`, or ours if there is none. It only enables `edge-fl-install.service`, which installs
the agent and is started at every boot until it succeeds. The edits are idempotent.

The files of cloud-init (Trixie) are left alone. It runs the commands in `user-data` once for each `instance-id`, so a card that has booted
before would never run ours; and under a new `instance-id` it would set passwords and host keys anew. systemd reads `cmdline.txt` at
every boot, and starts nothing of cloud-init in the one that runs the script: a new card is set up in the boot after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from edge_fl.errors import ConfigError
from edge_fl_devices.flash.bundle import LOG, MANIFEST, File, bundle_files, parse_manifest
from edge_fl_devices.flash.card_contents import CardContents
from edge_fl_devices.flash.targets.base import Target

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
CLUSTER_BYTES = 32768  # largest cluster of a FAT partition: the space of the smallest file
SPARE_BYTES = 4 << 20
BOOT_FILES = ("cmdline.txt", "firstrun.sh")


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


def plan_changes(
    target: Target, contents: Callable[[tuple[str, ...]], CardContents]
) -> tuple[list[File], list[str]]:
    """Return (files to write, files to remove); both are empty when the target holds the bundle already. Raises ConfigError.

    `contents` is called with the target's Python versions once the target has been checked.
    """
    planned = bundle_files(contents(target.pythons()))
    there = parse_manifest((target.read(MANIFEST) or b"").decode("utf-8", "replace"))
    wanted = parse_manifest(planned[-1].read().decode())
    new = [file for file in planned if file.path in wanted and there.get(file.path) != wanted[file.path]]
    old = [path for path in there if path not in wanted]
    if new or old:
        new.append(planned[-1])
    if target.is_boot_partition:
        new += _boot_files(target, is_new=bool(new))
    _check_space(target, new)
    return new, old


def apply_changes(target: Target, new: Sequence[File], old: Sequence[str]) -> None:
    """Write and remove files. An interruption leaves no manifest, so the next run starts over. Raises RunError."""
    if not new:
        return
    target.remove([MANIFEST, *old])
    target.write(new)


def list_changes(new: Sequence[File], old: Sequence[str]) -> list[dict[str, object]]:
    """Describe the changes as rows of {what, path, bytes, mode}, without contents."""
    written = [
        {"what": "write", "path": file.path, "bytes": file.size, "mode": f"{file.mode:04o}"} for file in new
    ]
    return [*written, *({"what": "remove", "path": path, "bytes": 0, "mode": ""} for path in old)]


def _boot_files(target: Target, *, is_new: bool) -> list[File]:
    """Return the changed boot files; none when the bundle is installed and unchanged. `cmdline.txt` is the last."""
    if target.read(LOG) is not None and not is_new:
        return []
    cmdline, firstrun = (_text(target, name) for name in BOOT_FILES)
    edits = {"firstrun.sh": add_install_call(firstrun), "cmdline.txt": add_kernel_options(cmdline or "")}
    return [File(name, text.encode()) for name, text in edits.items() if _text(target, name) != text]


def _text(target: Target, name: str) -> str | None:
    content = target.read(name)
    try:
        return None if content is None else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{target.name}: {name}: not UTF-8") from error


def _check_space(target: Target, new: Sequence[File]) -> None:
    need = sum(-(-file.size // CLUSTER_BYTES) * CLUSTER_BYTES for file in new) + SPARE_BYTES
    if new and need > (free := target.free_bytes()):
        raise ConfigError(
            f"{target.name}: {free / 1e6:.0f} MB are free; expected {need / 1e6:.0f} MB "
            "(--offline and --images need the most)"
        )
