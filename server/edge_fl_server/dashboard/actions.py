"""The actions behind the dashboard's buttons: each writes a desired state into the registry, which the running server applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge_fl.config import RolloutConfig
from edge_fl.errors import InputError
from edge_fl_server.registry import Database, rollouts, runs
from edge_fl_server.registry.records import DesiredRolloutState
from edge_fl_server.release.rollout.stages import ALL_AT_ONCE, CAREFUL
from edge_fl_server.release.rollout.stored_rollout import request


@dataclass(frozen=True)
class Action:
    """A button: the question before it, and the function that takes a fleet and a target and returns a message."""

    title: str
    text: str
    word: str
    do: Callable[[Database, str, str], str]
    danger: bool = False


def start(db: Database, fleet: str, release: str) -> str:
    """Request the roll-out of a release. Raises InputError during another roll-out."""
    number = int(release)
    if current := rollouts.current(db, fleet):
        raise InputError(
            f"release {number}: the roll-out of release {current.release} has not ended; abort it first"
        )
    stages = ALL_AT_ONCE if number < rollouts.served_release(db, fleet) else CAREFUL
    request(db, fleet, number, RolloutConfig(stages=stages))
    return f"Roll-out of release {number} requested; it starts when a server is online."


def _steer(desired: DesiredRolloutState, message: str) -> Callable[[Database, str, str], str]:
    def do(db: Database, fleet: str, number: str) -> str:
        record = rollouts.get(db, int(number))
        if record is None or record.fleet != fleet or record.state in rollouts.OVER:
            raise InputError(f"roll-out {number}: it has ended")
        rollouts.steer(db, record.number, desired)
        return message.format(release=record.release, previous=record.previous or "none")

    return do


def stop(db: Database, fleet: str, run: str) -> str:
    """Request the end of a run. Raises InputError if it has ended."""
    record = runs.get(db, run)
    if record is None or record.fleet != fleet or not runs.stop(db, run):
        raise InputError(f"run {run}: it is not running")
    return f"Run {run} stops after the current round."


ACTIONS = {
    "start": Action(
        "Roll out release {target}?",
        "Devices receive it stage by stage; a stage with bad results stops it. An older release goes to every device at once.",
        "Roll out",
        start,
    ),
    "pause": Action(
        "Pause the roll-out?",
        "No further stage starts. Devices that have the release keep it.",
        "Pause",
        _steer("paused", "Pause of release {release} requested."),
    ),
    "resume": Action(
        "Resume the roll-out?",
        "The next stage starts as soon as the previous one has responded.",
        "Resume",
        _steer("running", "Roll-out of release {release} resumed."),
    ),
    "abort": Action(
        "Abort the roll-out?",
        "Devices that have the release return to the previous one.",
        "Abort",
        _steer("aborted", "Abort of release {release} requested; devices return to release {previous}."),
        danger=True,
    ),
    "rollback": Action(
        "Roll the fleet back?",
        "Every device returns to the previous release at once.",
        "Roll back",
        _steer(
            "rolled_back", "Rollback of release {release} requested; devices return to release {previous}."
        ),
        danger=True,
    ),
    "stop": Action(
        "Stop {target}?",
        "The run ends after the current round, keeps its results, and can be resumed.",
        "Stop the run",
        stop,
        danger=True,
    ),
}
"""By the part of a button's `data-act` before the colon; the rest is the target."""
