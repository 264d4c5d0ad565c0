"""Start the agent: `python3 launcher.py HOME FACTORY ARGUMENTS...`. Belongs to no environment; no update replaces it; imports only Python.

HOME/state.json names the environment to start. A new one is on trial: it is started as a child, and unless it confirms itself (which the
agent does once it is connected and serves), the environment before returns: after three starts that end early, after `trial_s`, or when its
memory exceeds `memory_mb`. A confirmed environment that ends three times in a row before its agent runs gives way as well, in the end
to FACTORY, the environment of the installation, which no update changes. Whatever is wrong with HOME, FACTORY starts.

Under systemd a confirmed environment replaces this process, which saves memory, and systemd starts the launcher again after each end.
Otherwise the launcher stays the parent: after a failed trial, and when an agent exits with RESTART because it has switched to another
environment, it starts what the state names then.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STATE = "state.json"
MAX_STARTS = 3
POLL_S = 0.2
STOP_S = 10.0
RETRY_S = 1.0
RESTART = 75
State = dict[str, Any]


def read(home: Path, factory: Path) -> State:
    """Return the state; an empty one, which means the factory, if it is damaged or belongs to another installation."""
    try:
        state = json.loads((home / STATE).read_bytes())
        valid = isinstance(state, dict) and state.get("factory") == str(factory.resolve())
    except (OSError, ValueError):
        return {}
    return state if valid else {}


def write(home: Path, state: State) -> None:
    """Replace the state: after a power cut it is the old or the new one. A disk that takes nothing must not stop the agent."""
    part = home / f".{STATE}.part"
    try:
        with part.open("w") as file:
            json.dump(state, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(home / STATE)
        folder = os.open(home, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except OSError as error:
        tell(f"{home / STATE}: {error.strerror}")


def tell(line: str) -> None:
    """Write a line to the log."""
    sys.stderr.write(f"edge-fl launcher: {line}\n")


def returned(state: State, why: str) -> State:
    """The state after the current environment has failed."""
    failed = state.get("current", "")
    tell(f"{failed}: {why}; returning to {state.get('previous') or 'the factory environment'}")
    last = {**(state.get("last") or {}), "state": "failed", "why": why}
    return {
        **state,
        "current": state.get("previous", ""),
        "previous": "",
        "pending": False,
        "starts": 0,
        "last": last,
    }


def next_start(home: Path, factory: Path) -> tuple[Path, bool]:
    """Decide and record what starts now -> its Python, and whether it is on trial."""
    while (state := read(home, factory)).get("current"):
        python = home / state["current"] / "bin" / "python"
        if not os.access(python, os.X_OK):
            write(home, state := returned(state, "incomplete"))
        elif state.get("starts", 0) >= MAX_STARTS:
            write(home, state := returned(state, "crash_loop"))
        else:
            write(home, counted := {**state, "starts": state.get("starts", 0) + 1})
            if not state.get("pending"):
                return python, False
            if read(home, factory) == counted:
                return python, True
            previous = home / state["previous"] / "bin" / "python" if state.get("previous") else None
            if previous and os.access(previous, os.X_OK):
                return previous, False
            break  # a start that cannot be counted could be one of a loop
        if read(home, factory) != state:  # a disk that takes nothing
            break
    return factory / "bin" / "python", False


def run_child(command: list[str], home: Path, factory: Path, *, trial: bool) -> int | None:
    """Run an environment until it ends -> its exit code; None if it was on trial and was not confirmed."""
    child: subprocess.Popen[bytes] | None = None
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True
        if child:
            child.terminate()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    child = subprocess.Popen(command)
    if stopped:
        child.terminate()
    state = read(home, factory)
    until_s, why = time.monotonic() + state.get("trial_s", 0), ""
    while child.poll() is None:
        pending = trial and read(home, factory).get("pending")
        if pending and not stopped and memory_mb(child.pid) > state.get("memory_mb", 0):
            why = "out_of_memory"
        elif pending and not stopped and time.monotonic() > until_s:
            why = "not_connected"
        if why:
            end(child)
            write(home, returned(read(home, factory), why))
        elif not pending:
            child.wait()
        else:
            time.sleep(POLL_S)
    if stopped:
        sys.exit(0)
    unconfirmed = why or (trial and read(home, factory).get("pending"))
    return None if unconfirmed else child.returncode


def end(child: subprocess.Popen[bytes]) -> None:
    """End a child: in order if it can, else at once."""
    child.terminate()
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def memory_mb(pid: int) -> int:
    """Resident memory of a process in MB, 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def main(arguments: list[str]) -> int:
    """Start what the state names; return only after an environment on trial has ended."""
    home, factory = Path(arguments[0]), Path(arguments[1])
    systemd = "NOTIFY_SOCKET" in os.environ
    os.environ |= {"EDGE_FL_UPDATES": str(home), "EDGE_FL_FACTORY": str(factory)}
    while True:
        python, trial = next_start(home, factory)
        command = [str(python), "-I", "-m", "edge_fl", *arguments[2:]]
        try:
            if systemd and not trial:
                os.execv(python, command)
            code = run_child(command, home, factory, trial=trial)
            if systemd or code not in (None, RESTART):
                return RESTART if code is None else code
        except OSError as error:
            tell(f"{python}: {error.strerror}")
            if python == factory / "bin" / "python":
                return 1
            continue
        if code is None:
            time.sleep(RETRY_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
