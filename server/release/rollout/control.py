"""What a person wants of releases: written into the registry, where a running server finds it; without one, carried out from here."""

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
from edge_fl.wire.messages import ServerState, decode
from edge_fl.wire.topics import Topics
from server.mqtt.journal import Journal
from server.mqtt.retained import Connect, read_retained
from server.mqtt.session import connected
from server.registry import Database, rollouts
from server.registry.records import DesiredRolloutState, RolloutRecord
from server.release.repository import Repository
from server.release.rollout.rollout import Rollout
from server.release.rollout.staged import serving
from server.release.rollout.stages import EVERYBODY

POLL_S = 0.2
COLUMNS = {
    "release": "release",
    "method": "method",
    "run_id": "run_id",
    "round": "round",
    "kib": "KiB",
    "state": "roll-out",
    "stage": "stage",
    "reason": "why",
}
"""A row's fields, and how a table heads them."""


class Row(Struct, frozen=True):
    """One line of `release list`: a release that is kept, and how its last roll-out stands."""

    release: int
    method: str
    run_id: str
    round: int
    kib: int
    state: str
    stage: str
    reason: str


@dataclass(frozen=True)
class ReleaseControl:
    """Where releases of one fleet are kept, seen and published."""

    connect: Connect
    fleet: str
    home: Path
    db: Database

    @property
    def repository(self) -> Repository:
        """Raises InputError when nothing was ever released."""
        folder = self.home / self.fleet
        if not (folder / "metadata").is_dir():
            raise InputError(f"{folder}: no releases in it; expected --home of a server that released")
        return Repository(folder)

    def rows(self) -> list[Row]:
        """The kept releases, the newest first."""
        return [self._row(manifest.release) for manifest in reversed(self.repository.releases())]

    def roll_out(self, release: int | None, plan: RolloutConfig) -> int:
        """A kept release (None: the last) sets out, or goes on where it was paused -> the roll-out's number. Raises InputError."""
        unfinished = rollouts.current(self.db, self.fleet)
        if unfinished and release in (None, unfinished.release):
            rollouts.steer(self.db, unfinished.number, "running")
            return unfinished.number
        kept = [manifest.release for manifest in self.repository.releases()]
        wanted = kept[-1] if release is None and kept else release
        if wanted not in kept:
            raise InputError(f"release {wanted}: not kept, only {kept} are")
        fields = msgspec.to_builtins(plan)
        return rollouts.begin(self.db, self.fleet, wanted, previous=serving(self.db, self.fleet), plan=fields)

    def steer(self, wanted: DesiredRolloutState) -> int:
        """Pauses or aborts the roll-out under way -> its number. Raises InputError when there is none."""
        unfinished = rollouts.current(self.db, self.fleet)
        if unfinished is None:
            raise InputError(f"fleet {self.fleet!r}: no roll-out is under way")
        rollouts.steer(self.db, unfinished.number, wanted)
        return unfinished.number

    def roll_back(self, release: int | None) -> int:
        """Back to the release before the one under way or served, or to a kept one: everybody at once -> the roll-out's number."""
        unfinished = rollouts.current(self.db, self.fleet)
        if unfinished and release in (None, unfinished.previous):
            return self.steer("rolled_back")
        last = next(iter(rollouts.listed(self.db, self.fleet)), None)
        target = release or (last.previous if last else 0)
        if not target:
            raise InputError(f"fleet {self.fleet!r}: there is no release to go back to")
        return self.roll_out(target, RolloutConfig(stages=EVERYBODY))

    def carry_out(
        self, number: int, tell: Callable[[str], None], deadline_s: float, watch: Watch = unwatched
    ) -> RolloutRecord:
        """Lets the running server do it, or does it, until the roll-out rests. Raises DeadlineError, ConnectError.

        `watch` is told which of its stages is reached.
        """
        online = self._is_online()
        tell("the running server carries it out" if online else "no server is online: carried out from here")
        if online:
            return self._watch(number, tell, watch, deadline_s, lambda: None)
        with Journal(self.db, self.fleet) as journal, connected(self.connect, journal) as here:
            rollout = Rollout(
                here.connection,
                here.roster,
                here.inbox,
                here.assignments,
                self.repository,
                db=self.db,
                resume=True,
                watch=watch,
            )
            try:
                record = self._watch(number, tell, watch, deadline_s, here.connection.check)
                rollout.wait(0, max(1.0, min(deadline_s, 60.0)))
                return record
            finally:
                rollout.close()

    def _watch(
        self,
        number: int,
        tell: Callable[[str], None],
        watch: Watch,
        deadline_s: float,
        check: Callable[[], None],
    ) -> RolloutRecord:
        until_s, said = time.monotonic() + deadline_s, ""
        while True:
            check()
            record = rollouts.get(self.db, number)
            if record is None:
                raise InputError(f"roll-out {number}: not in the registry")
            if (now := f"release {record.release}: {_stands(record)}") != said:
                tell(said := now)
            watch(Count("stages", record.stage, len(record.plan.get("stages", [1.0]))))
            if record.state in rollouts.OVER or (record.state == record.desired == "paused"):
                return record
            if time.monotonic() > until_s:
                raise DeadlineError(
                    f"{said} after {deadline_s:g} s; it goes on as long as a server is online"
                )
            time.sleep(POLL_S)

    def _is_online(self) -> bool:
        topic = Topics(self.fleet).server_state()
        try:
            found = read_retained(self.connect, [topic]).get(topic)
            return bool(found) and decode(found or b"", ServerState).online
        except ProtocolError:
            return False

    def _row(self, release: int) -> Row:
        manifest = next(found for found in self.repository.releases() if found.release == release)
        record = next((r for r in rollouts.listed(self.db, self.fleet) if r.release == release), None)
        shares = record.plan.get("stages", [1.0]) if record else []
        return Row(
            release,
            manifest.method,
            manifest.run_id,
            manifest.round,
            -(-manifest.extractor.bytes // 1024),
            record.state if record else "",
            f"{record.stage + 1} of {len(shares)}" if record else "",
            record.reason if record else "",
        )


def _stands(record: RolloutRecord) -> str:
    shares = record.plan.get("stages", [1.0])
    share = f"stage {record.stage + 1} of {len(shares)} ({shares[min(record.stage, len(shares) - 1)]:.0%})"
    return f"{record.state}, {share}{', ' + record.reason if record.reason else ''}"
