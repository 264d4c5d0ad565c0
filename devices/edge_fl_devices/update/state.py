"""The state of agent updates on a device, `state.json`: which environment starts. The launcher reads and writes the same file.

    HOME/state.json     what starts, what was before, whether it is on trial; replaced atomically, it decides alone
    HOME/ID/            environment of one update

HOME is a folder of the agent's; FACTORY, the environment of the installation, belongs to root.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from edge_fl.files import atomic
from edge_fl.files.disk import reporting
from edge_fl_devices.storage import read_json

STATE = "state.json"
MAX_BLOCKED = 16


class UpdateOutcome(Struct, frozen=True):
    """How far the update `id` to the agent release `number` got: "trial", "done" or "failed", and the failure word."""

    id: str = ""
    number: int = 0
    state: str = ""
    why: str = ""


class UpdateState(Struct, frozen=True):
    """state.json. "" is the factory; `starts` counts those since the agent last ran; `blocked`: why an update failed here, by its id.

    `highest`: the highest number of an agent release that was confirmed here. `release`: the extractor that must be served before an
    environment on trial is confirmed; it has `trial_s` and `memory_mb`. `factory`: the installation that these environments extend.
    """

    factory: str
    current: str = ""
    previous: str = ""
    pending: bool = False
    starts: int = 0
    blocked: dict[str, str] = {}
    last: UpdateOutcome = UpdateOutcome()
    highest: int = 0
    release: int = 0
    trial_s: float = 0.0
    memory_mb: int = 0


class Updates:
    """The updates of one device, in the folder `home`; `factory` is the installation's environment."""

    def __init__(self, home: Path, factory: Path) -> None:
        self.home, self.factory = home, factory.resolve()

    @classmethod
    def of_environment(cls) -> Updates | None:
        """Return those that the launcher named to this process; None without a launcher."""
        home, factory = os.environ.get("EDGE_FL_UPDATES"), os.environ.get("EDGE_FL_FACTORY")
        return cls(Path(home), Path(factory)) if home and factory else None

    def state(self) -> UpdateState:
        """Return the state; that of a new installation if it is damaged or belongs to another one."""
        found = read_json(self.home / STATE, UpdateState)
        if found is None or found.factory != str(self.factory):
            return UpdateState(str(self.factory))
        return found

    def save(self, state: UpdateState) -> None:
        """Replace the state. Raises ArtefactError for a full disk."""
        with reporting(STATE):
            self.home.mkdir(parents=True, exist_ok=True)
            atomic.write(self.home / STATE, msgspec.json.encode(state))

    def note(self, update: UpdateOutcome) -> None:
        """Remember the outcome of an update that did not lead to a switch."""
        state = self.state()
        blocked = state.blocked
        if update.state == "failed":
            others = {id: why for id, why in blocked.items() if id != update.id}
            blocked = dict(list({**others, update.id: update.why}.items())[-MAX_BLOCKED:])
        self.save(replace(state, last=update, blocked=blocked))

    def switch(self, update: UpdateOutcome, *, release: int, trial_s: float, memory_mb: int) -> None:
        """Let the environment of `update` start next, on trial. All its files must be on the disk before."""
        os.sync()
        state = self.state()
        changed = replace(
            state,
            current=update.id,
            previous=state.current,
            pending=True,
            starts=0,
            last=update,
            release=release,
            trial_s=trial_s,
            memory_mb=memory_mb,
        )
        self.save(changed)

    def mark_running(self) -> None:
        """The agent runs: earlier starts no longer count, unless it is on trial."""
        state = self.state()
        if state.starts and not state.pending:
            self.save(replace(state, starts=0))

    def confirm(self) -> None:
        """End the trial of the running environment."""
        state = self.state()
        last = replace(state.last, state="done", why="")
        highest = max(state.highest, last.number)
        self.save(replace(state, pending=False, starts=0, last=last, highest=highest))

    def tidy(self) -> None:
        """Delete what no state names: environments of failed updates, leftovers of a power cut."""
        state = self.state()
        kept = {state.current, state.previous, STATE}
        if not self.home.is_dir():
            return
        for path in self.home.iterdir():
            if path.is_dir() and path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.endswith(".part"):
                path.unlink(missing_ok=True)
