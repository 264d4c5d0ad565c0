"""The current roll-out, stored in the registry: connects the pure rules (`stages`) with stored and desired states.

Any process may `request` a roll-out. Outcomes are collected in memory, from any thread; `advance` then applies the rules and the desired
state, and stores the result. After a restart the roll-out continues from the registry, with the reports stored there.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from edge_fl.console.units import SHOWN, clock, counted
from edge_fl.errors import shortened
from edge_fl.untrusted import converted
from edge_fl.wire.messages import GONE
from edge_fl_server.recipes.recipe import RolloutConfig
from edge_fl_server.registry import Database, registered_devices, registered_reports, rollouts
from edge_fl_server.registry.rollouts import OVER
from edge_fl_server.registry.tables import RolloutRecord, RolloutState, Subject
from edge_fl_server.release.rollout.gates import Outcome, outcome_of
from edge_fl_server.release.rollout.stages import (
    ALL_AT_ONCE,
    Stages,
    advanced,
    cause,
    members_of,
    resolved,
    steered,
    widened,
    with_outcome,
    with_panel,
)
from edge_fl_server.selectors import Selection, require

log = logging.getLogger(__name__)

REPLACED = "replaced by release {}"
RETRIES = 5
QUIET_S = 10.0
"""A stage without a report for so long says which devices it waits for."""


class StoredRollout:
    """The newest roll-out of one fleet. `stages` is None before the first; `previous` is what the whole fleet served before it (0: none).

    Devices that the roll-out does not select keep the release of the last completed roll-out that selected them. After a restart an
    unfinished roll-out continues; with `resume` devices also get the release of one that has ended. `assignment` is the id of the
    assignments to serve its release, different for a second roll-out of the same release.
    """

    def __init__(
        self, db: Database, fleet: str, *, resume: bool = False, subject: Subject = "extractor"
    ) -> None:
        self._db, self._fleet, self._subject = db, fleet, subject
        self._lock = threading.RLock()
        self._number, self.assignment = 0, ""
        self._stage_began_s = self._heard_s = time.monotonic()
        self._waits_for: tuple[str, ...] = ()  # as stored
        self._stored: tuple[RolloutState, int] = ("running", 0)
        self._resumed = False  # assignments have to be published again
        self._selection = Selection(db, fleet, "")
        self._partial: list[
            tuple[int, Selection]
        ] = []  # completed for selected devices since `previous`, newest first
        self.stages: Stages | None = None
        self.previous = rollouts.served_release(db, fleet, subject)
        newest = self._newest()
        if newest and (resume or newest.state not in OVER):
            self._resume(newest)

    def admits(self, device: str) -> bool:
        """Whether a device should run the release now."""
        return self.stages is not None and self.stages.admits(device) and device in self._selection

    def returns(self, device: str) -> bool:
        """Whether a device should go back to the release before."""
        return self.stages is not None and self.stages.returns(device) and device in self._selection

    def _before(self, device: str) -> int:
        """The release that a device served before this roll-out (0: none)."""
        return next((release for release, selection in self._partial if device in selection), self.previous)

    def target(self, device: str) -> tuple[int, str]:
        """The release that a device should run now (0: none), and the id of the assignment to do so."""
        if self.stages and self.admits(device):
            return self.stages.release, self.assignment
        before = self._before(device)
        back = self.returns(device)
        return before, f"back-{before}-{self._number}" if back else assignment_id(before, self._subject)

    @property
    def reported(self) -> Collection[str]:
        """Devices that have reported on this roll-out."""
        return self.stages.outcomes.keys() if self.stages else ()

    @property
    def moving(self) -> bool:
        """Whether the roll-out is running; no longer as soon as the registry says so."""
        return self.stages is not None and self._stored[0] == "running"

    def begin(
        self, release: int, plan: RolloutConfig, devices: Collection[str], *, panel: bool = False
    ) -> None:
        """Start the roll-out of a new release to a fleet of these devices; it replaces a running one. Raises SelectorError.

        panel: with stages "auto" a panel of the devices comes first (`edge_fl_server.release.rollout.stages`).
        """
        with self._lock:
            require(self._db, self._fleet, plan.where)
            selection = Selection(self._db, self._fleet, plan.where)
            devices = [device for device in devices if device in selection]
            self._end_others(release)
            self._note_completed()
            if panel and self.previous:
                plan = with_panel(plan, devices, release)
            plan = widened(resolved(plan, len(devices), self.previous), devices, release)
            fields = msgspec.to_builtins(plan)
            self._number = rollouts.begin(
                self._db, self._fleet, release, previous=self.previous, plan=fields, subject=self._subject
            )
            self._set(Stages(release, plan), assignment_id(release, self._subject))

    def expects(self, device: str, assignment: str) -> bool:
        """Whether a report on this assignment can be true: False before the stage of the device has begun."""
        return (
            not self.stages or assignment != self.assignment or self.stages.over or self.stages.admits(device)
        )

    def add_outcome(self, device: str, assignment: str, outcome: Outcome) -> None:
        """Add the outcome of a device's assignment with this id."""
        with self._lock:
            if self.stages and assignment == self.assignment and device in self._selection:
                self.stages = with_outcome(self.stages, device, outcome)
                self._heard_s = time.monotonic()

    def advance(self, present: Collection[str], is_blocked: Callable[[str], object]) -> bool:
        """Apply the rules and the desired state for the devices that are present; whether assignments have to change.

        Reports of devices that are blocked by now do not count as successes or failures of their stage.
        """
        with self._lock:
            self._apply_desired()
            resumed, self._resumed = self._resumed, False
            if self.stages is None:
                return False
            before, ran = self._stored, self.stages.state == "running"
            present = [device for device in present if device in self._selection]
            blocked = set(filter(is_blocked, self.reported))
            self.stages = advanced(self.stages, present, time.monotonic() - self._stage_began_s, blocked)
            if self.stages.stage != before[1]:
                self._stage_began_s = self._heard_s = time.monotonic()
            paused = ran and self.stages.state == "paused"  # perhaps at once after it was resumed
            if (now := (self.stages.state, self.stages.stage)) != before or paused:
                if paused:
                    rollouts.steer(self._db, self._number, "paused")  # else the next call would resume it
                self._store(self._number, *now, self.stages.reason)
                self._stored, self._waits_for = now, ()
                level = logging.INFO if now[0] in ("running", "completed") else logging.WARNING
                what = f"{'agent ' if self._subject == 'agent' else ''}release {self.stages.release}"
                why = cause(self.stages.reason, self.stages.stage)
                status = what, now[0], now[1] + 1, len(self.stages.shares), f", {why}" if why else ""
                log.log(level, "%s: %s, stage %d of %d%s", *status)
            elif now[0] == "running":
                self._say_what_it_waits_for(members_of(self.stages, present, blocked))
            return resumed or now != before

    def _say_what_it_waits_for(self, members: Sequence[str]) -> None:
        """Store as the reason of a running stage which devices it waits for, once no device has reported for a while."""
        assert self.stages
        missing = tuple(sorted(device for device in members if device not in self.stages.outcomes))
        if missing == self._waits_for or time.monotonic() < self._heard_s + QUIET_S:
            return
        left_s = self._stage_began_s + self.stages.plan.stage_wait_s - time.monotonic()
        until = datetime.now(UTC) + timedelta(seconds=left_s)
        answered = f"{len(members) - len(missing)} of {counted(len(members), 'device')} answered"
        names = shortened([*map(self._with_time, missing[:SHOWN]), *missing[SHOWN:]], SHOWN)
        why = f"{answered}, waits until {until:%H:%M} UTC for {names}" if missing else ""
        self._store(self._number, *self._stored, why)
        self._waits_for = missing

    def _with_time(self, device: str) -> str:
        """A device with the time of its last message."""
        record = registered_devices.get(self._db, self._fleet, device)
        return f"{device} (last message {clock(record.seen_at)[:16]} UTC)" if record else device

    def _apply_desired(self) -> None:
        """Follow the registry: the desired state of this roll-out, or a newer roll-out that another process started."""
        newest = self._newest()
        if newest and newest.number > self._number and newest.state not in OVER:
            self._note_completed()
            self._resume(newest)
        record = rollouts.get(self._db, self._number) if self._number else None
        if record and self.stages and not self.stages.over:
            self.stages = steered(self.stages, record.desired)

    def _resume(self, record: RolloutRecord) -> None:
        self._number, self.previous = record.number, record.previous or self.previous
        self._end_others(record.release, exclude=record.number)
        plan = converted({"stages": ALL_AT_ONCE, **record.plan}, RolloutConfig)
        reason = "" if record.state == "running" else record.reason
        stages = Stages(record.release, plan, record.stage, record.state, reason)
        known = rollouts.listed(self._db, self._fleet, self._subject)
        of_release = [other for other in known if other.release == record.release]
        repeated = record.number > min(other.number for other in of_release)
        assignment = assignment_id(record.release, self._subject)
        assignment += f"-again-{record.number}" if repeated else ""
        for report in registered_reports.of_release(self._db, self._fleet, record.release):
            if report.id == assignment:
                stages = with_outcome(stages, report.device, outcome_of(report.error, report.metrics))
        self._set(stages, assignment, record.state)
        self._resumed = True

    def _set(self, stages: Stages, assignment: str, stored: RolloutState = "running") -> None:
        """`stored` is the state in the registry: reports from before a restart may have aborted the roll-out, which `advance` stores."""
        self.stages, self.assignment, self._stored = stages, assignment, (stored, stages.stage)
        self._stage_began_s = self._heard_s = time.monotonic()
        self._waits_for = ()
        self._selection = Selection(self._db, self._fleet, stages.plan.where)
        self._partial = []
        for record in rollouts.listed(self._db, self._fleet, self._subject):
            if record.number < self._number and record.state == "completed":
                if not record.where:
                    break
                self._partial.append((record.release, Selection(self._db, self._fleet, record.where)))

    def _note_completed(self) -> None:
        """Make the release of a completed roll-out that had selected all devices the one to go back to."""
        if self.stages and self.stages.state == "completed" and not self.stages.plan.where:
            self.previous = self.stages.release

    def _newest(self) -> RolloutRecord | None:
        return next(iter(rollouts.listed(self._db, self._fleet, self._subject)), None)

    def _end_others(self, release: int, exclude: int = 0) -> None:
        for record in rollouts.listed(self._db, self._fleet, self._subject):
            if record.state not in OVER and record.number != exclude:
                self._store(record.number, "replaced", record.stage, REPLACED.format(release))

    def _store(self, number: int, state: RolloutState, stage: int, reason: str) -> None:
        for _ in range(RETRIES):
            record = rollouts.get(self._db, number)
            if record is None or rollouts.advance(self._db, record, state=state, stage=stage, reason=reason):
                return
        log.warning("roll-out %d: concurrent changes in the registry; %s was not stored", number, state)


def request(
    db: Database, fleet: str, release: int, plan: RolloutConfig, subject: Subject = "extractor"
) -> int:
    """Request the roll-out of a kept release -> its number; its stages are widened to the devices of the registry that take part.

    Raises SelectorError.
    """
    require(db, fleet, plan.where)
    selection = Selection(db, fleet, plan.where)
    present = [
        record.device
        for record in registered_devices.listed(db, fleet)
        if _takes_part(record.capability or {}, subject)
        and record.status not in GONE
        and not record.blocked
        and record.device in selection
    ]
    previous = rollouts.previous_release(db, fleet, release, subject)
    # Each installation has an agent, so there is always one to go back to.
    plan = widened(resolved(plan, len(present), previous or subject == "agent"), present, release)
    return rollouts.begin(
        db, fleet, release, previous=previous, plan=msgspec.to_builtins(plan), subject=subject
    )


def _takes_part(capability: Mapping[str, Any], subject: Subject) -> bool:
    """Whether a device has to report on roll-outs: head-only ones on extractors, those that are updated on agents."""
    if subject == "agent":
        return (capability.get("update") or {"state": "declined"})["state"] != "declined"
    return capability.get("tier") == "head"


def assignment_id(release: int, subject: Subject = "extractor") -> str:
    """The id of the assignments to serve a release, and of the reports on them; of the requests to run an agent release."""
    return f"{'agent' if subject == 'agent' else 'rel'}-{release}"
