"""The roll-out under way, between `server.release.rollout.stages`, which knows how it moves, and the registry, where people see and steer it.

What devices answer is noted in memory, from any thread; `advance` then moves the roll-out, does as it was told from another process, and
writes down where it stands. After a restart it goes on where the registry has it, with the reports that were kept there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection

import msgspec

from edge_fl.config import RolloutConfig
from server.registry import Database, reports, rollouts
from server.registry.records import RolloutRecord
from server.release.rollout.gates import Outcome, outcome_of
from server.release.rollout.stages import EVERYBODY, Stages, State, moved, noted, settled, steered

log = logging.getLogger(__name__)

OVERTAKEN = "overtaken by release {}"
RETRIES = 5


class StagedRollout:
    """The newest roll-out of one fleet. `stages` is None before the first; `previous` is the release to go back to (0: none).

    One in stages goes on after a restart; one to everybody at once, which its server did not see to the end, only with `resume`.

    `want` is the id of the want to serve its release, one of its own where a release sets out for a second time, `way_back` that of the
    want to serve the one before again.
    """

    def __init__(
        self, db: Database, fleet: str, *, resume: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._db, self._fleet, self._clock = db, fleet, clock
        self._lock = threading.RLock()
        self._number, self.assignment = 0, ""
        self._stage_began_s = clock()
        self._written: tuple[State, int] = ("running", 0)
        self._untold = False  # devices have not heard yet where the roll-out stands
        self.stages: Stages | None = None
        self.previous = serving(db, fleet)
        unfinished = rollouts.current(db, fleet)
        if unfinished and (resume or len(_plan(unfinished).stages) > 1):
            self._take_over(unfinished)
        elif unfinished:
            self._write(unfinished.number, "aborted", unfinished.stage, "its server ended")

    @property
    def way_back(self) -> str:
        return f"back-{self.previous}-{self._number}"

    @property
    def answered(self) -> Collection[str]:
        """Devices whose reports on this roll-out are there."""
        return self.stages.outcomes.keys() if self.stages else ()

    @property
    def moving(self) -> bool:
        """Whether a staged roll-out is under way, and nobody paused it."""
        return self.stages is not None and self.stages.gated and self.stages.state == "running"

    def begin(self, release: int, plan: RolloutConfig, devices: int) -> None:
        """A new release sets out to so many devices; one that was still on its way is overtaken."""
        with self._lock:
            if self.stages and not self.stages.over:
                self._write(self._number, "aborted", self.stages.stage, OVERTAKEN.format(release))
            elif self.stages and self.stages.state == "completed":
                self.previous = self.stages.release
            plan = settled(plan, devices, self.previous)
            fields = msgspec.to_builtins(plan)
            self._number = rollouts.begin(self._db, self._fleet, release, previous=self.previous, plan=fields)
            self._set(Stages(release, plan), assignment_id(release))

    def note(self, device: str, assignment: str, outcome: Outcome) -> None:
        """What a device answered to the want of this id."""
        with self._lock:
            if self.stages and assignment == self.assignment:
                self.stages = noted(self.stages, device, outcome)

    def advance(self, there: Collection[str]) -> bool:
        """Moves the roll-out as its devices, those who are `there`, and people want it; whether devices have to be told."""
        with self._lock:
            self._as_told()
            untold, self._untold = self._untold, False
            if self.stages is None:
                return False
            before = self._written
            self.stages = moved(self.stages, there, self._clock() - self._stage_began_s)
            if self.stages.stage != before[1]:
                self._stage_began_s = self._clock()
            if (now := (self.stages.state, self.stages.stage)) != before:
                if self.stages.state == "paused":
                    rollouts.steer(self._db, self._number, "paused")  # or it would go on at the next call
                self._write(self._number, *now, self.stages.reason)
                self._written = now
                log.info("release %d: %s, stage %d %s", self.stages.release, *now, self.stages.reason)
            return untold or now != before

    def _as_told(self) -> None:
        """Follows what the registry says is wanted: of this roll-out, or of one that was begun in another process."""
        newest = rollouts.current(self._db, self._fleet)
        if newest and newest.number != self._number:
            if self.stages and self.stages.state == "completed":
                self.previous = self.stages.release
            self._take_over(newest)
        record = rollouts.get(self._db, self._number) if self._number else None
        if record and self.stages and not self.stages.over:
            self.stages = steered(self.stages, record.desired)

    def _take_over(self, record: RolloutRecord) -> None:
        self._number, self.previous = record.number, record.previous or self.previous
        state: State = "paused" if record.state == "paused" else "running"
        stages = Stages(record.release, _plan(record), record.stage, state, record.reason)
        earlier = [
            known.number
            for known in rollouts.listed(self._db, self._fleet)
            if known.release == record.release
        ]
        again = record.number > min(earlier)
        assignment = assignment_id(record.release) + (f"-again-{record.number}" if again else "")
        for report in reports.of_release(self._db, self._fleet, record.release):
            if report.id == assignment:
                stages = noted(stages, report.device, outcome_of(report.error, report.metrics))
        self._set(stages, assignment)
        self._untold = True

    def _set(self, stages: Stages, assignment: str) -> None:
        self.stages, self.assignment, self._written = stages, assignment, (stages.state, stages.stage)
        self._stage_began_s = self._clock()
        if stages.state == "aborted":
            # by what was reported before the restart: `advance` has still to write it down
            self._written = ("running", stages.stage)

    def _write(self, number: int, state: State, stage: int, reason: str) -> None:
        for _ in range(RETRIES):
            record = rollouts.get(self._db, number)
            if record is None or rollouts.advance(self._db, record, state=state, stage=stage, reason=reason):
                return
        log.warning("roll-out %d: the registry keeps changing; %s is not written down", number, state)


def serving(db: Database, fleet: str) -> int:
    """The release that a fleet serves, as far as the registry knows (0: none): a new one is compared with it, and may go back to it."""
    for record in rollouts.listed(db, fleet):
        if record.state == "completed":
            return record.release
        if record.previous:
            return record.previous
    return 0


def assignment_id(release: int) -> str:
    """Of the want to serve a release, and of the report that answers it."""
    return f"rel-{release}"


def _plan(record: RolloutRecord) -> RolloutConfig:
    return msgspec.convert({"stages": EVERYBODY, **record.plan}, RolloutConfig)
