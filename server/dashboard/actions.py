"""What the dashboard's buttons do: each writes into the registry what is wanted, and the running server does it.

A roll-out that is begun goes stage after stage; going back to an older release is a roll-out of it to everybody at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edge_fl.errors import InputError
from server.dashboard.queries.releases import serving
from server.registry import Database, rollouts, runs
from server.registry.records import DesiredRolloutState
from server.release.rollout.stages import CAREFUL, EVERYBODY


@dataclass(frozen=True)
class Action:
    """A button: what it asks, and what happens when the answer is yes. `{of}` is what it is pressed for."""

    title: str
    text: str
    word: str
    danger: bool
    do: Callable[[Database, str, str], str]


def start(db: Database, fleet: str, release: str) -> str:
    """A release sets out. Raises InputError while another one is on its way."""
    wanted = int(release)
    if under_way := rollouts.current(db, fleet):
        raise InputError(f"release {wanted}: release {under_way.release} is on its way; abort that one first")
    before = serving(tuple(rollouts.listed(db, fleet)))
    plan: dict[str, Any] = {"stages": list(EVERYBODY if wanted < before else CAREFUL)}
    rollouts.begin(db, fleet, wanted, previous=before if before != wanted else 0, plan=plan)
    return f"Release {wanted} sets out as soon as the server sees it."


def _steer(desired: DesiredRolloutState, said: str) -> Callable[[Database, str, str], str]:
    def do(db: Database, fleet: str, number: str) -> str:
        record = rollouts.get(db, int(number))
        if record is None or record.fleet != fleet or record.state in rollouts.OVER:
            raise InputError(f"roll-out {number}: it is over")
        rollouts.steer(db, record.number, desired)
        return said.format(release=record.release, previous=record.previous or "none")

    return do


def stop(db: Database, fleet: str, run: str) -> str:
    """A run ends after the round under way. Raises InputError when it does not go on."""
    record = runs.get(db, run)
    if record is None or record.fleet != fleet or not runs.stop(db, run):
        raise InputError(f"run {run}: it does not go on")
    return f"{run} ends after the round under way."


ACTIONS: dict[str, Action] = {
    "start": Action(
        "Roll out release {of}?",
        "Devices get it stage after stage; a stage that does badly stops it. Going back to an older release reaches every device at once.",
        "Roll out",
        False,
        start,
    ),
    "pause": Action(
        "Pause the roll-out?",
        "No further stage begins. Devices that have the release keep it.",
        "Pause",
        False,
        _steer("paused", "Release {release} is asked to pause."),
    ),
    "resume": Action(
        "Go on with the roll-out?",
        "The next stage begins as soon as the one before has answered.",
        "Go on",
        False,
        _steer("running", "Release {release} goes on."),
    ),
    "abort": Action(
        "Abort the roll-out?",
        "Devices that have the release go back to the one before.",
        "Abort",
        True,
        _steer("aborted", "Release {release} is given up; devices go back to {previous}."),
    ),
    "rollback": Action(
        "Roll the fleet back?",
        "Every device goes back to the release before, at once.",
        "Roll back",
        True,
        _steer("rolled_back", "Release {release} is taken back; devices go back to {previous}."),
    ),
    "stop": Action(
        "Stop {of}?",
        "It ends after the round under way, keeps what it has measured, and can be resumed.",
        "Stop the run",
        True,
        stop,
    ),
}
"""By the word in front of a button's `data-act`."""
