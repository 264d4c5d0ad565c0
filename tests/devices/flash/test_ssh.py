"""A running Pi, replaced by an `ssh` stub that runs its command here, with stubs for the Pi's programs."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_fl.errors import ConfigError, ConnectError, RunError
from edge_fl_devices.flash.card_contents import CardContents
from edge_fl_devices.flash.changes import apply_changes, plan_changes
from edge_fl_devices.flash.targets.ssh import Ssh

MakeContents = Callable[[tuple[str, ...]], CardContents]
SSH = """#!/bin/sh
# ssh [-o OPTION]... WHERE COMMAND
while [ "$1" = -o ]; do shift 2; done
[ "$1" != gone ] || { echo "ssh: connect to host gone: No route to host" >&2; exit 255; }
cd "$PI_HOME" && PATH="$PI_BIN:$PATH" exec sh -c "$2"
"""


@pytest.fixture
def pi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`pi(machine, python)` returns the home folder of a Pi with this architecture and Python."""
    (tmp_path / "path").mkdir()
    home, programs = tmp_path / "home", tmp_path / "bin"
    home.mkdir()
    programs.mkdir()

    def program(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def make(
        machine: str = "arm64", python: str = "3.13", installs: bool = True, free_kb: int = 10**6
    ) -> Path:
        program(tmp_path / "path" / "ssh", SSH)
        program(programs / "dpkg", f"#!/bin/sh\necho {machine}\n")
        program(programs / "python3", f"#!/bin/sh\necho {python}\n")
        program(programs / "df", f"#!/bin/sh\necho Filesystem\necho /dev/root 1 1 {free_kb} 1% /\n")
        bundle = f"{tmp_path}/seen/edge-fl/bundle.sha256"
        program(
            programs / "cat", f'#!/bin/sh\n[ "$1" != /opt/edge-fl/bundle.sha256 ] || exec /bin/cat {bundle}\n'
        )
        # sudo sh INSTALL: keeps what the script would have found; sudo rm: does it
        install = f"cp -a .edge-fl-flash {tmp_path}/seen" if installs else "echo no space left >&2; exit 1"
        program(programs / "sudo", f'#!/bin/sh\nif [ "$1" = sh ]; then {install}; else "$@"; fi\n')
        monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
        monkeypatch.setenv("PI_HOME", str(home))
        monkeypatch.setenv("PI_BIN", str(programs))
        return home

    return make


def test_the_bundle_is_sent_installed_and_gone(
    pi: Callable[..., Path], contents: MakeContents, tmp_path: Path
) -> None:
    home = pi()
    target = Ssh("pi@pi-07")
    new, old = plan_changes(target, contents)
    assert [file.path for file in new if "requirements" in file.path] == ["edge-fl/requirements-3.13.txt"]
    apply_changes(target, new, old)
    assert list(home.iterdir()) == []
    seen = tmp_path / "seen"
    assert stat.S_IMODE(seen.stat().st_mode) == 0o700
    assert stat.S_IMODE((seen / "edge-fl/identity/client.key").stat().st_mode) == 0o600
    assert (seen / "edge-fl/wheels/tiny-1.0-py3-none-any.whl").read_bytes() == b"a wheel"
    assert plan_changes(target, contents) == ([], [])  # it is installed


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ({"machine": "armhf"}, "its system is armhf; expected 64-bit"),
        ({"python": "3.9"}, "Python 3.9; expected 3.11 or 3.13"),
        ({"free_kb": 1000}, "1 MB are free; expected 5 MB"),
    ],
)
def test_a_pi_that_cannot_run_it_is_rejected(
    pi: Callable[..., Path], contents: MakeContents, says: dict[str, str], why: str
) -> None:
    pi(**says)
    with pytest.raises(ConfigError, match=why):
        plan_changes(Ssh("pi@pi-07"), contents)


def test_a_pi_that_is_not_there_or_fails_to_install_is_named(
    pi: Callable[..., Path], contents: MakeContents
) -> None:
    pi(installs=False)
    with pytest.raises(ConnectError, match="gone: ssh: ssh: connect to host gone: No route to host"):
        plan_changes(Ssh("gone"), contents)
    target = Ssh("pi@pi-07")
    new, old = plan_changes(target, contents)
    with pytest.raises(RunError, match="no space left; flash it again"):
        apply_changes(target, new, old)
