"""A board made of a userland, or a Raspberry Pi made of an image and a userland; its programs run under emulation."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

from tests.arm64 import apart, userland
from tests.devices.flash import cards

BOOT_S = 1800


class Board:
    """`root` is its file system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, *command: str, deadline_s: float = BOOT_S) -> str:
        """Run a command that must succeed and return its output."""
        with self._started(command, subprocess.PIPE) as process:
            out, err = process.communicate(timeout=deadline_s)
        said = out.decode(errors="replace")
        assert process.returncode == 0, f"{command}: {process.returncode}\n{said[-3000:]}\n{err[-3000:]!r}"
        return said

    def attempt(self, *command: str, deadline_s: float = BOOT_S) -> int:
        """Run a command and return its exit code."""
        with self._started(command, subprocess.DEVNULL) as process:
            return process.wait(deadline_s)

    @contextmanager
    def running(self, *command: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command until the block ends; it is then killed, as by a power cut."""
        with log.open("wb") as out, self._started(command, out) as process:
            yield process

    @contextmanager
    def _started(self, command: tuple[str, ...], out: IO[bytes] | int) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(
            self._apart(*command), stdout=out, stderr=out, env=_environment(), start_new_session=True
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # with all descendants, unless it has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)

    def _apart(self, *command: str) -> list[str]:
        return [sys.executable, apart.__file__, str(self.root), *command]


class Pi(Board):
    """A board with the content of `card` under /boot/firmware."""

    def __init__(self, card: Path, root: Path) -> None:
        super().__init__(root)
        self.card = card
        self.boot = root / "boot/firmware"
        shutil.rmtree(self.boot)
        self.boot.mkdir()
        cards.mtools(card, "mcopy", "-s", "-m", "::/*", str(self.boot))


def resident(pid: int) -> tuple[int, int]:
    """Resident bytes of an emulated process: those of its program, and those of the emulator, such as the code that it translated.

    The emulator keeps the program's addresses, which end far below a terabyte; its own begin above.
    """
    program = emulator = 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line):
            of_program = int(mapping[1], 16) < 2**40
        elif found := re.match(r"Rss:\s+(\d+) kB", line):
            program += 1024 * int(found[1]) * of_program
            emulator += 1024 * int(found[1]) * (not of_program)
    return program, emulator


def require() -> None:
    """Skip where aarch64 programs cannot run as separate users."""
    if os.geteuid():
        pytest.skip("not root: files cannot have owners in there")
    root = userland.build(userland.BASE)
    command = [sys.executable, apart.__file__, str(root), "/bin/true"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=_environment()
    )
    if done.returncode:
        pytest.skip(f"no private binfmt_misc here (Linux 6.7 or newer has it): {done.stderr.strip()[-200:]}")


def _environment() -> dict[str, str]:
    return {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LC_ALL": "C.UTF-8",
        "QEMU_CPU": userland.CPU,
        "PIP_NO_COMPILE": "1",
    }
