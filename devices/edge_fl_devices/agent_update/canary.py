"""Test a new environment before the switch: the same canary runs in the running one, and whatever fails only in the new one stops it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_fl import signals
from edge_fl.errors import ArtefactError, ChildError, KilledError, RunError, brief
from edge_fl.failures import Failure
from edge_fl.untrusted import NOT_JSON
from edge_fl_devices.agent_update import environment
from edge_fl_devices.child import THREADS, again_if_killed

DEADLINE_S = 600.0
STAYS = "the running agent stays"


class CanaryAnswer(Struct, frozen=True):
    """The answer of a canary: what was found by failed checks, by name, and predicted classes. Both versions of an update read it."""

    failed: dict[str, str] = {}
    classes: list[str] = []


def require(new: Path, running: Path, folder: Path) -> None:
    """Raise ArtefactError ("canary_failed") if the new environment fails where the running one does not, or predicts other classes.

    folder: of the device. Raises RunError if the running one cannot be tested either, ChildError if the system killed one.
    """
    try:
        found = again_if_killed(lambda: run(new, folder))
    except (RunError, KilledError) as error:
        raise _failed(error.message) from error
    before = again_if_killed(lambda: run(running, folder))
    for name, what in found.failed.items():
        if name not in before.failed:
            raise _failed(f"{name}: {what}")
    if found.classes != before.classes:
        differing = sum(one != other for one, other in zip(found.classes, before.classes, strict=False))
        raise _failed(f"predicts other classes for {differing} of {len(before.classes)} samples")


def run(tested: Path, folder: Path) -> CanaryAnswer:
    """Run the canary of an environment in a child.

    Raises RunError if it gives no answer, KilledError if a signal ended it, ChildError if the system killed it.
    """
    python = environment.python(tested)
    command = [os.fspath(python), "-I", "-m", "edge_fl_devices.agent_update.canary_child", os.fspath(folder)]
    try:
        child = subprocess.run(
            command,
            capture_output=True,
            timeout=DEADLINE_S,
            env={**os.environ, **dict.fromkeys(THREADS, "1")},
            check=False,
        )
        lines = child.stdout.decode(errors="replace").strip().splitlines()
        if child.returncode == 0 and lines:
            return msgspec.json.decode(lines[-1], type=CanaryAnswer)
    except (OSError, subprocess.SubprocessError, *NOT_JSON) as error:
        raise RunError(f"agent canary: {brief(error)}", STAYS) from error
    if child.returncode == -signal.SIGKILL:  # by the running agent's side, so it may fit later
        raise ChildError("agent canary: out of memory, the system killed the child", STAYS)
    if ended_by := signals.name(child.returncode):
        raise KilledError(f"agent canary: the child {signals.ending(child.returncode)}", ended_by, STAYS)
    last = child.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
    raise RunError(f"agent canary: exit code {child.returncode}, {brief(last[0])}", STAYS)


def _failed(what: str) -> ArtefactError:
    return ArtefactError(f"agent canary: {what}", Failure.CANARY_FAILED, STAYS)
