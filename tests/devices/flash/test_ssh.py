"""A running Pi, replaced by an `ssh` stub that runs its command here, with stubs for the Pi's programs."""

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_fl.errors import ConfigError, ConnectError, RunError
from edge_fl_devices.flash.bundle import File
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
        machine: str = "arm64",
        python: str = "3.13",
        install: str = "",
        free_kb: int = 10**6,
        opt_mb: int = 2000,
        systemd: str = "running",
        sudo: str = "",
    ) -> Path:
        program(tmp_path / "path" / "ssh", SSH)
        program(programs / "dpkg", f"#!/bin/sh\necho {machine}\n")
        program(programs / "python3", f"#!/bin/sh\necho {python}\n")
        free = f"[ $1 = -Pm ] && free={opt_mb} || free={free_kb}"
        program(programs / "df", f"#!/bin/sh\n{free}\necho Filesystem\necho /dev/root 1 1 $free 1% /\n")
        program(programs / "systemctl", f"#!/bin/sh\necho {systemd}\n")
        program(programs / "id", "#!/bin/sh\necho 1000\n")
        bundle = f"{tmp_path}/seen/edge-fl/bundle.sha256"
        program(
            programs / "cat", f'#!/bin/sh\n[ "$1" != /opt/edge-fl/bundle.sha256 ] || exec /bin/cat {bundle}\n'
        )
        # sudo -n sh INSTALL: keeps what the script would have found; sudo -n rm: does it
        run = install or f"cp -a .edge-fl-flash {tmp_path}/seen"
        program(programs / "sudo", f'#!/bin/sh\n{sudo}\nshift\nif [ "$1" = sh ]; then {run}; else "$@"; fi\n')
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
        ({"opt_mb": 599}, "599 MB are free in /opt; expected 600; nothing was sent"),
        ({"systemd": "offline"}, "systemd does not run; expected Raspberry Pi OS"),
        (
            {"sudo": "echo 'sudo: a password is required' >&2; exit 1"},
            r"sudo does not work without a password \(sudo: a password is required\); allow it there, or .* --out",
        ),
    ],
)
def test_a_pi_that_cannot_run_it_is_rejected(
    pi: Callable[..., Path], contents: MakeContents, says: dict[str, str], why: str
) -> None:
    home = pi(**says)
    with pytest.raises(ConfigError, match=why):
        plan_changes(Ssh("pi@pi-07"), contents)
    assert list(home.iterdir()) == []


def test_a_pi_that_is_not_there_or_fails_to_install_is_named(
    pi: Callable[..., Path], contents: MakeContents
) -> None:
    home = pi(install="echo no space left >&2; exit 1")
    with pytest.raises(ConnectError, match="gone: ssh: ssh: connect to host gone: No route to host"):
        plan_changes(Ssh("gone"), contents)
    target = Ssh("pi@pi-07")
    new, old = plan_changes(target, contents)
    with pytest.raises(RunError, match="no space left; what was sent was removed; flash it again"):
        apply_changes(target, new, old)
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("left", ["client.key", "a folder of root"])
def test_what_an_earlier_flash_left_behind_is_removed_by_the_probe(
    pi: Callable[..., Path], contents: MakeContents, left: str
) -> None:
    home = pi()
    (home / ".edge-fl-flash/edge-fl").mkdir(parents=True)
    (home / ".edge-fl-flash/edge-fl" / left).write_text("a key")
    plan_changes(Ssh("pi@pi-07"), contents)
    assert list(home.iterdir()) == []


def test_nothing_stays_if_the_connection_is_lost_while_files_are_sent(
    pi: Callable[..., Path], contents: MakeContents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = pi()
    target = Ssh("pi@pi-07")
    new, old = plan_changes(target, contents)

    def lost(file: File) -> bytes:
        if file.path.endswith(".whl"):
            assert wait_for(home / ".edge-fl-flash")
            raise KeyboardInterrupt
        return read(file)

    read = File.read
    monkeypatch.setattr(File, "read", lost)
    with pytest.raises(KeyboardInterrupt):
        apply_changes(target, new, old)
    assert wait_for(home / ".edge-fl-flash", gone=True) and list(home.iterdir()) == []
    assert not (tmp_path / "seen").exists()


def wait_for(path: Path, *, gone: bool = False, deadline_s: float = 30.0) -> bool:
    """Wait until a path exists, or is gone -> whether it was so in time."""
    ends_s = time.monotonic() + deadline_s
    while path.exists() is gone and time.monotonic() < ends_s:
        time.sleep(0.01)
    return path.exists() is not gone
