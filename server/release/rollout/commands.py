"""Commands on releases: list, roll out, pause, abort, roll back. A running server carries them out, otherwise this process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_fl.config import RolloutConfig
from edge_fl.console.progress import Count, Watch, unwatched
from edge_fl.errors import DeadlineError, InputError, ProtocolError
from edge_fl.wire.messages import GONE, ServerState, decode
from edge_fl.wire.topics import Topics
from server.mqtt.journal import Journal
from server.mqtt.reader import LIMITS, ServerConnect, is_alive, read_retained
from server.mqtt.session import connected
from server.registry import Database, devices, rollouts
from server.registry.records import DesiredRolloutState, RolloutRecord
from server.release.repository import Repository
from server.release.rollout.coordinator import RolloutCoordinator, RolloutOptions
from server.release.rollout.stages import ALL_AT_ONCE, widened
from server.release.rollout.stored_rollout import served_release

POLL_S = 0.2
COLUMNS = {
    "release": "release",
    "method": "method",
    "run_id": "run",
    "round": "round",
    "kib": "KiB",
    "state": "roll-out",
    "stage": "stage",
    "reason": "why",
}
"""A row's fields and their table headings."""


class Row(Struct, frozen=True):
    """A row of `release list`: a kept release and the state of its last roll-out."""

    release: int
    method: str
    run_id: str
    round: int
    kib: int
    state: str
    stage: str
    reason: str


@dataclass(frozen=True)
class ReleaseCommands:
    """Commands on the releases of one fleet, which are kept in the folder `home`/`fleet`."""

    connect: ServerConnect
    fleet: str
    home: Path
    db: Database

    @property
    def repository(self) -> Repository:
        """The repository of the fleet's releases. Raises InputError if nothing was released."""
        folder = self.home / self.fleet
        if not (folder / "metadata").is_dir():
            raise InputError(f"{folder}: no releases in it; expected --home of a server that released")
        return Repository(folder)

    def rows(self) -> list[Row]:
        """The kept releases, newest first."""
        records = rollouts.listed(self.db, self.fleet)
        rows = []
        for manifest in reversed(self.repository.releases()):
            record = next((record for record in records if record.release == manifest.release), None)
            rows.append(
                Row(
                    release=manifest.release,
                    method=manifest.method,
                    run_id=manifest.run_id,
                    round=manifest.round,
                    kib=-(-manifest.extractor.bytes // 1024),
                    state=record.state if record else "",
                    stage=f"{record.stage + 1} of {len(_shares(record))}" if record else "",
                    reason=record.reason if record else "",
                )
            )
        return rows

    def roll_out(self, release: int | None, plan: RolloutConfig) -> int:
        """Request the roll-out of a kept release (None: the last), or resume a paused one -> its number. Raises InputError."""
        unfinished = rollouts.current(self.db, self.fleet)
        if unfinished and release in (None, unfinished.release):
            rollouts.steer(self.db, unfinished.number, "running")
            return unfinished.number
        kept = [manifest.release for manifest in self.repository.releases()]
        target = kept[-1] if release is None and kept else release
        if target not in kept:
            raise InputError(f"release {target}: not kept, only {kept} are")
        previous = served_release(self.db, self.fleet)
        present = [
            record.device
            for record in devices.listed(self.db, self.fleet)
            if (record.capability or {}).get("tier") == "head"
            and record.status not in GONE
            and not record.blocked
        ]
        plan = widened(plan, present, target)
        return rollouts.begin(self.db, self.fleet, target, previous=previous, plan=msgspec.to_builtins(plan))

    def steer(self, desired: DesiredRolloutState) -> int:
        """Request to pause or abort the current roll-out -> its number. Raises InputError if there is none."""
        unfinished = rollouts.current(self.db, self.fleet)
        if unfinished is None:
            raise InputError(f"fleet {self.fleet!r}: no roll-out is under way")
        rollouts.steer(self.db, unfinished.number, desired)
        return unfinished.number

    def roll_back(self, release: int | None) -> int:
        """Request to go back to a kept release (None: the previous one) on all devices at once -> the roll-out's number."""
        unfinished = rollouts.current(self.db, self.fleet)
        if unfinished and release in (None, unfinished.previous):
            return self.steer("rolled_back")
        last = next(iter(rollouts.listed(self.db, self.fleet)), None)
        target = release or (last.previous if last else 0)
        if not target:
            raise InputError(f"fleet {self.fleet!r}: there is no release to go back to")
        return self.roll_out(target, RolloutConfig(stages=ALL_AT_ONCE))

    def carry_out(
        self, number: int, report: Callable[[str], None], deadline_s: float, watch: Watch = unwatched
    ) -> RolloutRecord:
        """Wait until the roll-out has ended or paused; carry it out here if no server is online.

        `report` receives a line per state, `watch` the current stage. Raises DeadlineError, ConnectError.
        """
        online = self._is_online()
        report(
            "the running server carries it out" if online else "no server is online: carried out from here"
        )
        if online:
            return self._follow(number, report, deadline_s, watch)
        with Journal(self.db, self.fleet) as journal, connected(self.connect, journal) as server:
            coordinator = RolloutCoordinator(
                server, self.repository, RolloutOptions(resume=True, watch=watch)
            )
            try:
                record = self._follow(number, report, deadline_s, watch, server.connection.check)
                coordinator.wait(0, max(1.0, min(deadline_s, 60.0)))
                return record
            finally:
                coordinator.close()

    def _follow(
        self,
        number: int,
        report: Callable[[str], None],
        deadline_s: float,
        watch: Watch,
        check: Callable[[], None] = lambda: None,
    ) -> RolloutRecord:
        until_s, reported = time.monotonic() + deadline_s, ""
        while True:
            check()
            record = rollouts.get(self.db, number)
            if record is None:
                raise InputError(f"roll-out {number}: not in the registry")
            if (status := f"release {record.release}: {_status(record)}") != reported:
                report(reported := status)
            watch(Count("stages", record.stage, len(_shares(record))))
            if record.state in rollouts.OVER or (record.state == record.desired == "paused"):
                return record
            if time.monotonic() > until_s:
                raise DeadlineError(
                    f"{status} after {deadline_s:g} s",
                    consequence="the roll-out continues while a server is online",
                )
            time.sleep(POLL_S)

    def _is_online(self) -> bool:
        topics = Topics(self.fleet)
        topic = topics.server_state()
        try:
            payload = read_retained(self.connect, [topic]).get(topic)
            state = decode(payload, ServerState) if payload else None
            # A retained "online" remains where a server and its broker ended without notice: only a beat counts.
            return bool(state and state.online and is_alive(self.connect, topics, state.boot, LIMITS))
        except ProtocolError:
            return False


def _shares(record: RolloutRecord) -> list[float]:
    shares: list[float] = record.plan.get("stages", [1.0])
    return shares


def _status(record: RolloutRecord) -> str:
    shares = _shares(record)
    share = f"stage {record.stage + 1} of {len(shares)} ({shares[min(record.stage, len(shares) - 1)]:.0%})"
    return f"{record.state}, {share}{', ' + record.reason if record.reason else ''}"
