"""Update the agent while it runs: look up, fetch, build, test, switch, confirm. The running environment is never changed.

A thread with its own transfers, over the agent's connection; fits and predictions are not involved. It ends with a restart: the launcher
starts the new environment on trial, in which this module confirms it once it was connected and served for `confirm_s`. Everything else ends
with the old agent, and a word for the server.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from edge_fl import __version__, threads
from edge_fl.blob import Blob
from edge_fl.errors import ArtefactError, DeadlineError, EdgeFLError, ProtocolError, StoppedError, TrustError
from edge_fl.failures import Failure
from edge_fl.files.disk import reporting, require_space
from edge_fl.files.shared import make_folder
from edge_fl.process_limits import total_memory_mb
from edge_fl.release.agent import AgentRelease, AgentUpdate, AgentWheel, UpdateStatus
from edge_fl.wire.topics import Topics
from edge_fl.wire.transport import Connect, Connected, Disconnected, Event, Listener, Packet, Transport
from edge_fl_devices.agent.effects import Effect
from edge_fl_devices.agent.events import Failed, UpdateChanged
from edge_fl_devices.agent.state import AgentState, Phase
from edge_fl_devices.agent_update.launcher import RESTART
from edge_fl_devices.agent_update.state import CLOSED, Updates, UpdateState
from edge_fl_devices.config import DeviceConfig, UpdateConfig
from edge_fl_devices.install.fetch import Download, MetadataFetch, Sink
from edge_fl_devices.install.trust import Trust
from edge_fl_devices.storage.chunks import Chunks, ChunkSink

log = logging.getLogger(__name__)

POLL_S = 0.5
END_S = 5.0
RETRY_S, MAX_RETRY_S = 5.0, 600.0
RUNNING_S = 60.0  # an agent that has run this long has started
RESERVE_BYTES = 32 * 1024 * 1024
BYTECODE = 2  # size of an installed wheel with bytecode, in sizes of its files
MEMORY_SHARE = 0.6  # of the board's memory, for an agent on trial


class Transfers:
    """One transfer at a time. `put` receives all events of the connection, in any thread; `carry_out` subscribes and publishes."""

    def __init__(self, device: str, topics: Topics, carry_out: Callable[[Iterable[Effect]], None]) -> None:
        self._device, self._topics, self._carry_out = device, topics, carry_out
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._transfer: Download | MetadataFetch | None = None
        self._closed = False

    def put(self, event: Event) -> None:
        """Take what concerns the transfer under way."""
        if self._transfer:
            self._events.put(event)

    def close(self) -> None:
        """End the transfer under way."""
        self._closed = True

    def metadata(self, number: int) -> dict[str, bytes]:
        """Fetch the files of the signed metadata. Raises ArtefactError if there are none."""
        transfer = MetadataFetch(number, self._device, self._topics)
        self._run(transfer)
        if isinstance(transfer.outcome, dict):
            return transfer.outcome
        raise DeadlineError("no signed metadata on the broker", "trying again later")

    def download(self, blob: Blob, sink: Sink) -> None:
        """Fetch the missing chunks of a blob. Raises ArtefactError ("chunk_hash", "enospc"), DeadlineError."""
        transfer = Download(blob, sink, self._device, self._topics)
        self._run(transfer)
        if isinstance(failed := transfer.outcome, Failed):
            if failed.reason == Failure.DEADLINE:
                raise DeadlineError(failed.detail, "trying again later")
            raise ArtefactError(failed.detail, failed.reason)

    def _run(self, transfer: Download | MetadataFetch) -> None:
        self._events = queue.SimpleQueue()
        self._transfer = transfer
        try:
            self._carry_out(transfer.begin(time.monotonic()))
            while transfer.outcome is None:
                if self._closed:
                    raise StoppedError("the agent stops")
                left_s = min(max(transfer.wake_s - time.monotonic(), 0.0), POLL_S)
                try:
                    event = self._events.get(timeout=left_s)
                except queue.Empty:
                    pass
                else:
                    self._carry_out(self._handled(transfer, event))
                self._carry_out(transfer.tick(time.monotonic()))
        finally:
            self._transfer = None

    def _handled(self, transfer: Download | MetadataFetch, event: Event) -> Iterable[Effect]:
        now_s = time.monotonic()
        match event:
            case Connected():
                return transfer.begin(now_s)
            case Disconnected():
                transfer.pause()
            case Packet():
                return self._received(transfer, event, now_s)
        return ()

    def _received(self, transfer: Download | MetadataFetch, packet: Packet, now_s: float) -> Iterable[Effect]:
        try:
            address = self._topics.parse(packet.topic)
        except ProtocolError:
            return ()
        return transfer.received(address, packet.payload, now_s)


class AgentUpdater:
    """The updates of the software of one device's agent.

    state: of the running agent. carry_out: subscribes and publishes. report: takes the events for the agent. stop: ends the agent, for the
    launcher to start another one. exit_code: of the process; RESTART after a switch, else 0.
    """

    def __init__(
        self,
        updates: Updates,
        config: DeviceConfig,
        trust: Trust,
        state: Callable[[], AgentState],
        carry_out: Callable[[Iterable[Effect]], None],
        report: Callable[[UpdateChanged], None],
        stop: Callable[[], None],
    ) -> None:
        self.exit_code = 0
        self._updates, self._folder, self._config = updates, Path(config.folder), config.update
        self._trust, self._agent, self._report, self._stop = trust, state, report, stop
        self._transfers = Transfers(config.id, Topics(config.broker.fleet), carry_out)
        self._state = _as_it_runs(updates)
        self._desired: AgentUpdate | None = None
        self._tested = ""  # the id of the update whose environment is complete and tested
        self._retry_s, self._next_s = RETRY_S, 0.0
        self.status = self._of(self._state.last)

    def through(self, connect: Connect) -> Connect:
        """Connect with `connect`, and listen."""

        def listening(name: str, will: Packet | None, deliver: Listener, /) -> Transport:
            def both(event: Event) -> None:
                self._transfers.put(event)
                deliver(event)

            return connect(name, will, both)

        return listening

    @contextmanager
    def running(self) -> Iterator[None]:
        """Update while the block runs."""
        stopped = threading.Event()
        thread = threads.lasting(partial(self._run, stopped), "edge-fl-updates", stopped=stopped)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            self._transfers.close()
            thread.join(END_S)

    def desire(self, update: AgentUpdate | None) -> None:
        """Take the desired state; in any thread."""
        if update != self._desired:
            self._desired, self._next_s, self._retry_s = update, 0.0, RETRY_S

    def _run(self, stopped: threading.Event) -> None:
        """Work until `stopped`, or until the agent has to restart."""
        started_s = unready_s = time.monotonic()
        while not stopped.wait(POLL_S):
            now_s = time.monotonic()
            try:
                if self._state.pending:
                    if not self._is_ready():
                        unready_s = now_s
                    elif now_s - unready_s >= self._config.confirm_s:
                        unready_s = now_s  # for another try
                        self._confirm()
                    continue
                if self._state.starts and now_s - started_s >= RUNNING_S:
                    self._state = self._updates.mark_running()
                desired, last = self._desired, self._state.last
                is_closed = desired and desired.id == last.id and last.state in CLOSED
                if desired and now_s >= self._next_s and not is_closed:
                    self._pursue(desired)
            except StoppedError:
                return
            except Exception:
                log.exception("agent update: trying again in %g s", self._retry_s)
                self._delay()

    def _is_ready(self) -> bool:
        """Whether the agent is connected, and serves a release if it did before."""
        agent = self._agent()
        return agent.phase is Phase.UP and bool(agent.release or not self._state.serves)

    def _confirm(self) -> None:
        try:
            self._state = self._updates.confirm()
        except ArtefactError as error:
            log.warning("agent release %d: not confirmed: %s", self._state.number, error)
            self._show(replace(self._state.last, why=f"{error.why}: {error.message}"[:400]))
            return
        self._end(self._state.last)
        log.warning("agent release %d: confirmed", self._state.number)

    def _pursue(self, desired: AgentUpdate) -> None:
        """Take an update as far as possible now."""
        update = UpdateStatus(desired.number, desired.id)
        try:
            if desired.number == self._state.number:
                self._end(replace(update, state="done"))
            elif not self._config.automatic:
                self._show(replace(update, state="declined"))
                self._delay()
            elif self._tested == desired.id or self._prepare(update):
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

    def _prepare(self, update: UpdateStatus) -> bool:
        """Build and test the environment; False if the agent restarts already."""
        if self._state.last.id != update.id:
            self._state = self._updates.save(replace(self._state, last=update, since_s=time.time()))
        from edge_fl_devices.agent_update import canary, environment

        self._show(replace(update, state="fetching"))
        releases = {
            release.number: release
            for release in self._trust.agents(self._transfers.metadata(update.number).__getitem__)
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
        environment.require_allowed(release, __version__, withdrawn=withdrawn)
        folder = self._updates.folder(release.number)
        if not environment.is_complete(folder):
            self._build(release, update)
        self._show(replace(update, state="testing"))
        canary.require(folder, self._updates.folder(self._state.number), self._folder)
        self._tested = update.id
        return True

    def _build(self, release: AgentRelease, update: UpdateStatus) -> None:
        from packaging.tags import sys_tags

        from edge_fl_devices.agent_update import environment

        self._updates.tidy(keep=release.number)
        factory = environment.distributions(self._updates.factory)
        wheels = environment.needed(release, factory, list(sys_tags()), platform.python_version())
        fetched_bytes = 2 * sum(wheel.blob.bytes for wheel in wheels)  # chunks, and the files of them
        needed_bytes = fetched_bytes + BYTECODE * sum(wheel.unpacked for wheel in wheels) + RESERVE_BYTES
        with reporting(f"agent release {release.number}"):
            make_folder(self._updates.home)
        require_space(self._updates.home, needed_bytes, f"agent release {release.number}")
        folder = self._updates.folder(release.number)
        with reporting(f"agent release {release.number}"):
            make_folder(folder / environment.WHEELS)
        place = folder / environment.WHEELS
        paths = {self._fetched(wheel, place): wheel.unpacked for wheel in wheels}
        self._show(replace(update, state="installing"))
        environment.build(folder, self._updates.factory, paths)

    def _fetched(self, wheel: AgentWheel, folder: Path) -> Path:
        """Return the wheel's file, from an environment that has it or from the broker."""
        path = folder / wheel.file
        for kept in self._updates.home.glob(f"*/{folder.name}/{wheel.file}"):
            if _is(kept, wheel.blob):
                if kept != path:
                    with reporting(wheel.file):
                        shutil.copyfile(kept, path)
                return path
        chunks = Chunks(self._updates.home / "chunks")
        self._transfers.download(wheel.blob, ChunkSink(chunks, wheel.blob))
        chunks.assemble(wheel.blob, path)
        return path

    def _switch(self, update: UpdateStatus) -> None:
        """Switch within the owner's hours."""
        if wait := postponed(self._config, self._state.since_s, datetime.now().astimezone()):
            self._show(replace(update, state="postponed", why=wait))
            return
        self._updates.switch(
            replace(update, state="trial"),
            serves=bool(self._agent().release),
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

    def _restart(self) -> None:
        self.exit_code = RESTART
        self._stop()

    def _delay(self) -> None:
        self._next_s = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)

    def _show(self, update: UpdateStatus) -> None:
        if (status := self._of(update)) != self.status:
            self.status = status
            self._report(UpdateChanged(status))

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
