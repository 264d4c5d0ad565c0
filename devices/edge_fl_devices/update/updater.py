"""Update the agent while it runs: look up, fetch, build, test, switch, confirm. The running environment is never changed.

A thread with its own transfers; fits and predictions are not involved. It ends with a restart: the launcher starts the new environment
on trial, in which this module confirms it once it was connected and served for `confirm_s`. Everything else ends with the old agent, and
a word for the server.
"""

import hashlib
import logging
import platform
import shutil
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from msgspec.structs import replace

from edge_fl import __version__
from edge_fl.blob import Blob
from edge_fl.errors import ArtefactError, EdgeFLError, StoppedError, TrustError
from edge_fl.failures import Failure
from edge_fl.files.disk import reporting, require_space
from edge_fl.files.shared import make_folder
from edge_fl.memory import total_memory_mb
from edge_fl.release.agent import AgentRelease, AgentUpdate, AgentWheel, UpdateStatus
from edge_fl_devices.config import UpdateConfig
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.storage.chunks import Chunks, ChunkSink
from edge_fl_devices.update.state import CLOSED, Updates, UpdateState
from edge_fl_devices.update.transfers import Transfers

log = logging.getLogger(__name__)

POLL_S = 0.5
RETRY_S, MAX_RETRY_S = 5.0, 600.0
RUNNING_S = 60.0  # an agent that has run this long has started
RESERVE_BYTES = 32 * 1024 * 1024
BYTECODE = 2  # size of an installed wheel with bytecode, in sizes of its files
MEMORY_SHARE = 0.6  # of the board's memory, for an agent on trial


class AgentUpdater:
    """The updates of one device's agent.

    folder: of the device. ready: whether the agent is connected, and serves a release if it did before. report: publishes the status.
    restart: ends the agent, for the launcher to start another one.
    """

    def __init__(
        self,
        updates: Updates,
        folder: Path,
        config: UpdateConfig,
        *,
        ready: Callable[[bool], bool],
        serves: Callable[[], bool],
        report: Callable[[UpdateStatus], None],
        restart: Callable[[], None],
    ) -> None:
        self._updates, self._folder, self._config = updates, folder, config
        self._ready, self._serves, self._report, self._restart = ready, serves, report, restart
        self._state = _as_it_runs(updates)
        self._desired: AgentUpdate | None = None
        self._tested = ""  # the id of the update whose environment is complete and tested
        self._retry_s, self._next_s = RETRY_S, 0.0
        self.status = self._of(self._state.last)

    def desire(self, update: AgentUpdate | None) -> None:
        """Take the desired state; in any thread."""
        if update != self._desired:
            self._desired, self._next_s, self._retry_s = update, 0.0, RETRY_S

    def run(self, transfers: Transfers, trust: Trust, stopped: threading.Event) -> None:
        """Work until `stopped`, or until the agent has to restart."""
        started_s = unready_s = time.monotonic()
        while not stopped.wait(POLL_S):
            now_s = time.monotonic()
            try:
                if self._state.pending:
                    if not self._ready(self._state.serves):
                        unready_s = now_s
                    elif now_s - unready_s >= self._config.confirm_s:
                        unready_s = now_s  # for another try
                        self._confirm()
                    continue
                if self._state.starts and now_s - started_s >= RUNNING_S:
                    self._updates.mark_running()
                    self._state = self._updates.state()
                desired = self._desired
                if desired and now_s >= self._next_s and not self._is_closed(desired):
                    self._pursue(desired, transfers, trust)
            except StoppedError:
                return
            except Exception:
                log.exception("agent update: trying again in %g s", self._retry_s)
                self._delay()

    def _is_closed(self, desired: AgentUpdate) -> bool:
        return desired.id == self._state.last.id and self._state.last.state in CLOSED

    def _confirm(self) -> None:
        try:
            self._updates.confirm()
        except ArtefactError as error:
            log.warning("agent release %d: not confirmed: %s", self._state.number, error)
            self._show(replace(self._state.last, why=f"{error.why}: {error.message}"[:400]))
            return
        self._state = self._updates.state()
        self._end(replace(self._state.last, state="done", why=""))
        log.warning("agent release %d: confirmed", self._state.number)

    def _pursue(self, desired: AgentUpdate, transfers: Transfers, trust: Trust) -> None:
        """Take an update as far as possible now."""
        update = UpdateStatus(desired.number, desired.id)
        try:
            if desired.number == self._state.number:
                self._end(replace(update, state="done"))
            elif not self._config.automatic:
                self._show(replace(update, state="declined"))
                self._delay()
            elif self._tested == desired.id or self._prepare(update, transfers, trust):
                self._switch(update)
        except TrustError as error:  # an ArtefactError, but newer metadata may be all right
            self._postpone(update, error.why or Failure.INVALID, error)
        except ArtefactError as error:
            log.warning("agent release %d: %s", desired.number, error)
            self._end(
                replace(update, state="failed", why=f"{error.why or Failure.ARTEFACT}: {error.message}"[:400])
            )
        except StoppedError:
            raise
        except EdgeFLError as error:
            self._postpone(update, "waiting", error)

    def _prepare(self, update: UpdateStatus, transfers: Transfers, trust: Trust) -> bool:
        """Build and test the environment; False if the agent restarts already."""
        if self._state.last.id != update.id:
            self._updates.save(replace(self._state, last=update, since_s=time.time()))
            self._state = self._updates.state()
        from edge_fl_devices.update import canary, environment, plan  # memory of an agent without an update

        self._show(replace(update, state="fetching"))
        releases = {
            release.number: release for release in trust.agents(transfers.metadata(update.number).__getitem__)
        }
        running = releases.get(self._state.number)
        withdrawn = running is not None and running.withdrawn
        if update.number == 0:
            if not withdrawn:
                raise ArtefactError(
                    "agent release 0: expected a signed withdrawal of the running one", Failure.DOWNGRADE
                )
            self._updates.return_to_factory(replace(update, state="done"))
            self._restart()
            return False
        if update.number not in releases:
            raise TrustError(f"agent release {update.number}: not among the signed ones", Failure.MISSING)
        release = releases[update.number]
        plan.require_allowed(release, __version__, withdrawn=withdrawn)
        folder = self._updates.folder(release.number)
        if not environment.is_complete(folder):
            self._build(release, update, transfers)
        self._show(replace(update, state="testing"))
        canary.require(folder, self._updates.folder(self._state.number), self._folder)
        self._tested = update.id
        return True

    def _build(self, release: AgentRelease, update: UpdateStatus, transfers: Transfers) -> None:
        from packaging.tags import sys_tags

        from edge_fl_devices.update import environment, plan

        self._updates.tidy(keep=release.number)
        factory = environment.distributions(self._updates.factory)
        wheels = plan.needed(release, factory, list(sys_tags()), platform.python_version())
        fetched_bytes = 2 * sum(wheel.blob.bytes for wheel in wheels)  # chunks, and the files of them
        needed_bytes = fetched_bytes + BYTECODE * sum(wheel.unpacked for wheel in wheels) + RESERVE_BYTES
        with reporting(f"agent release {release.number}"):
            make_folder(self._updates.home)
        require_space(self._updates.home, needed_bytes, f"agent release {release.number}")
        folder = self._updates.folder(release.number)
        with reporting(f"agent release {release.number}"):
            make_folder(folder / environment.WHEELS)
        place = folder / environment.WHEELS
        paths = {self._fetched(wheel, place, transfers): wheel.unpacked for wheel in wheels}
        self._show(replace(update, state="installing"))
        environment.build(folder, self._updates.factory, paths)

    def _fetched(self, wheel: AgentWheel, folder: Path, transfers: Transfers) -> Path:
        """Return the wheel's file, from an environment that has it or from the broker."""
        path = folder / wheel.file
        for kept in self._updates.home.glob(f"*/{folder.name}/{wheel.file}"):
            if _is(kept, wheel.blob):
                if kept != path:
                    with reporting(wheel.file):
                        shutil.copyfile(kept, path)
                return path
        chunks = Chunks(self._updates.home / "chunks")
        transfers.download(wheel.blob, ChunkSink(chunks, wheel.blob))
        chunks.assemble(wheel.blob, path)
        return path

    def _switch(self, update: UpdateStatus) -> None:
        """Switch within the owner's hours."""
        if wait := postponed(self._config, self._state.since_s, datetime.now().astimezone()):
            self._show(replace(update, state="postponed", why=wait))
            return
        self._updates.switch(
            replace(update, state="trial"),
            serves=self._serves(),
            trial_s=self._config.trial_s,
            memory_mb=int(MEMORY_SHARE * total_memory_mb()),
        )
        self._show(replace(update, state="trial"))
        log.warning("agent release %d: starting it on trial", update.number)
        self._restart()

    def _end(self, update: UpdateStatus) -> None:
        """Store and report the outcome, and delete what is no longer needed. On a full disk the next start forgets the outcome."""
        self._state = replace(self._state, last=update)
        try:
            self._updates.note(update)
        except ArtefactError as error:
            log.warning("agent release %d: %s", update.number, error)
        self._show(update)
        self._updates.tidy()

    def _postpone(self, update: UpdateStatus, word: str, error: EdgeFLError) -> None:
        log.warning("agent release %d: %s; trying again in %g s", update.number, error, self._retry_s)
        self._show(replace(update, state="fetching", why=f"{word}: {error.message}"[:400]))
        self._delay()

    def _delay(self) -> None:
        self._next_s = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def _show(self, update: UpdateStatus) -> None:
        if (status := self._of(update)) != self.status:
            self.status = status
            self._report(status)

    def _of(self, update: UpdateStatus) -> UpdateStatus:
        """The status to report: with the number that runs, not that of the update."""
        declined = not self._config.automatic and update.state == "idle"
        return replace(update, number=self._state.number, state="declined" if declined else update.state)


def postponed(config: UpdateConfig, since_s: float, now: datetime) -> str:
    """Why an update first seen at `since_s` waits for its switch, "" if it does not."""
    if since_s <= now.timestamp() < since_s + 3600 * config.delay_h:
        until = datetime.fromtimestamp(since_s + 3600 * config.delay_h).astimezone()
        return f"until {until:%Y-%m-%d %H:%M}"
    if config.hours:
        first, last = map(int, config.hours.split("-"))
        inside = first <= now.hour < last if first <= last else now.hour >= first or now.hour < last
        return "" if inside else f"hours {config.hours}"
    return ""


def _as_it_runs(updates: Updates) -> UpdateState:
    """The stored state; without the trial if the launcher could not count its start, and started what was before."""
    state = updates.state()
    if not state.pending or Path(sys.prefix).resolve() == updates.folder(state.number).resolve():
        return state
    why = f"{Failure.ENOSPC}: the start of the trial could not be stored; it is tried at the next start"
    return replace(
        state, current=state.previous, pending=False, last=replace(state.last, state="failed", why=why)
    )


def _is(path: Path, blob: Blob) -> bool:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == blob.sha256
    except OSError:
        return False
