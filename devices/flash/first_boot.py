"""The edits that make a card run `edge-fl/install.sh` at its first boot, beside whatever Raspberry Pi Imager has set up on it.

On Trixie cloud-init runs what `user-data` lists. On Bookworm systemd runs a script that `cmdline.txt` names: Imager's own
`firstrun.sh` where there is one, else ours. All are pure functions of the texts, and change nothing the second time.
"""

from __future__ import annotations

import io
import re

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from edge_fl.errors import ConfigError

INSTALL = "/boot/firmware/edge-fl/install.sh"
CALL = f"sh {INSTALL} --first-boot || true"
SCRIPT = "/boot/firmware/firstrun.sh"
WORDS = f" systemd.run={SCRIPT} systemd.run_success_action=reboot systemd.unit=kernel-command-line.target"
FIRSTRUN = f"""#!/bin/sh
# Runs once, at the first boot, and removes itself: systemd is told to by cmdline.txt.
{CALL}
rm -f {SCRIPT}
sed -i 's|{WORDS.replace(".", "[.]")}||' /boot/firmware/cmdline.txt
sync
exit 0
"""
USER_DATA, HEADER = "user-data", "#cloud-config"


def edits(cmdline: str, firstrun: str | None, user_data: str | None, *, installed: bool) -> dict[str, str]:
    """The files to change, with their new texts, `cmdline.txt` last. Raises ConfigError.

    cloud-init heeds its `user-data` once in a card's life, so an `installed` card gets the script.
    """
    if user_data is not None and not installed:
        return {USER_DATA: with_command(user_data)}
    return {"firstrun.sh": with_call(firstrun), "cmdline.txt": with_words(cmdline)}


def with_words(cmdline: str) -> str:
    """The kernel's command line, in one line, with the words that let systemd run the script."""
    line = " ".join(cmdline.split())
    runs = re.search(r"\bsystemd\.run=(\S+)", line)
    if runs and not runs[1].endswith("/firstrun.sh"):
        raise ConfigError(f"cmdline.txt: runs {runs[1]} already; expected firstrun.sh or nothing")
    return f"{line if runs else line + WORDS}\n"


def with_call(firstrun: str | None) -> str:
    """The first boot's script with our call in it, before it removes itself."""
    if firstrun is None:
        return FIRSTRUN
    if INSTALL in firstrun:
        return firstrun
    lines = firstrun.splitlines()
    ends = [number for number, line in enumerate(lines) if re.search(r"\brm\b.*firstrun\.sh\s*$", line)]
    if not firstrun.startswith("#!") or not ends:
        raise ConfigError(
            "firstrun.sh: is not what Raspberry Pi Imager writes (a script that removes itself at its end); "
            "expected that or none"
        )
    return "\n".join([*lines[: ends[0]], CALL, *lines[ends[0] :], ""])


def with_command(user_data: str) -> str:
    """cloud-init's orders with our command at the end of `runcmd`; everything else, comments too, stays."""
    parser = YAML()
    try:
        tree = parser.load(user_data)
    except YAMLError as error:
        raise ConfigError(f"user-data: not YAML ({_brief(error)})") from error
    if user_data.split("\n", 1)[0].rstrip() != HEADER or not isinstance(tree, dict | None):
        raise ConfigError(f"user-data: expected a mapping under the line {HEADER}")
    commands = (tree or {}).get("runcmd")
    if INSTALL in str(commands):
        return user_data
    if commands is None:
        return f"{user_data.rstrip()}\n\nruncmd:\n- [sh, {INSTALL}]\n"
    if not isinstance(commands, list):
        raise ConfigError("user-data: runcmd is not a list")
    commands.append(["sh", INSTALL])
    text = io.StringIO()
    parser.dump(tree, text)
    return text.getvalue()


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
