"""The state of agent updates on a device, `state.json`: which environment starts. The launcher reads and writes the same file.

    HOME/state.json     what starts, what was before, whether it is on trial; replaced atomically, it decides alone
    HOME/NUMBER/        environment of one agent release, with its wheels in `wheels/`; `complete` is its last file
    HOME/chunks/        verified chunks of a download under way

HOME is a folder of the agent's; FACTORY, the environment of the installation, belongs to root and is never changed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from edge_fl.files.disk import reporting
from edge_fl.files.shared import make_folder
from edge_fl.release.agent import UpdateStatus
from edge_fl_devices.agent_update.launcher import STATE
from edge_fl_devices.storage import read_json, write_json

COMPLETE = "complete"
CLOSED = frozenset({"done", "failed"})


class UpdateState(Struct, frozen=True):
    """state.json. `current` and `previous` name environments, "" the factory; `starts` counts those since the agent last ran.

    `last` is the last update, with the number that it should lead to, and `since_s` when the device first saw it. An environment on trial
    (`pending`) has `trial_s` and `memory_mb`; if `serves`, it must serve a release before it is confirmed. `factory`: the installation
    that these environments extend.
    """

    factory: str
    current: str = ""
    previous: str = ""
    pending: bool = False
    starts: int = 0
    last: UpdateStatus = UpdateStatus(0)
    since_s: float = 0.0
    serves: bool = False
    trial_s: float = 0.0
    memory_mb: int = 0

    @property
    def number(self) -> int:
        """The agent release that runs, 0 for the installation's."""
        return int(self.current or 0)


class Updates:
    """The updates of one device, in the folder `home`; `factory` is the installation's environment."""

    def __init__(self, home: Path, factory: Path) -> None:
        self.home, self.factory = home, factory.resolve()

    @classmethod
    def of_environment(cls) -> Updates | None:
        """Return those that the launcher named to this process; None without a launcher."""
        home, factory = os.environ.get("EDGE_FL_UPDATES"), os.environ.get("EDGE_FL_FACTORY")
        return cls(Path(home), Path(factory)) if home and factory else None

    def folder(self, number: int) -> Path:
        """The environment of an agent release; 0 is the factory's."""
        return self.home / str(number) if number else self.factory

    def state(self) -> UpdateState:
        """Return the state; that of a new installation if it is damaged or belongs to another one."""
        found = read_json(self.home / STATE, UpdateState)
        if found is None or found.factory != os.fspath(self.factory):
            return UpdateState(os.fspath(self.factory))
        return found

    def save(self, state: UpdateState) -> UpdateState:
        """Replace the state, and return it. Raises ArtefactError for a full disk, as all that follow."""
        with reporting(STATE):
            make_folder(self.home)
            write_json(self.home / STATE, state)
        return state

    def note(self, update: UpdateStatus) -> None:
        """Remember how far an update got."""
        self.save(replace(self.state(), last=update))

    def switch(self, update: UpdateStatus, *, serves: bool, trial_s: float, memory_mb: int) -> None:
        """Let the environment of `update.number` start next, on trial. All its files are on the disk before."""
        os.sync()
        state = self.state()
        changed = replace(
            state,
            current=str(update.number),
            previous=state.current,
            pending=True,
            starts=0,
            last=update,
            serves=serves,
            trial_s=trial_s,
            memory_mb=memory_mb,
        )
        self.save(changed)

    def return_to_factory(self, update: UpdateStatus) -> None:
        """Let the factory's environment start next; it needs no trial."""
        self.save(replace(self.state(), current="", previous="", pending=False, starts=0, last=update))

    def mark_running(self) -> UpdateState:
        """The agent runs: earlier starts no longer count, unless it is on trial."""
        state = self.state()
        return self.save(replace(state, starts=0)) if state.starts and not state.pending else state

    def confirm(self) -> UpdateState:
        """End the trial of the running environment."""
        state = self.state()
        return self.save(
            replace(state, pending=False, starts=0, last=replace(state.last, state="done", why=""))
        )

    def tidy(self, keep: int = 0) -> None:
        """Delete all environments but those that the state names and that of the release `keep`; without `keep`, the chunks too."""
        state = self.state()
        kept = {state.current, state.previous, str(keep), "chunks" if keep else ""}
        for path in self.home.iterdir() if self.home.is_dir() else ():
            if path.is_dir() and path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.endswith(".part"):
                path.unlink(missing_ok=True)
