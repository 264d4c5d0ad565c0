"""The actions behind the dashboard's buttons: each asks with its effect, then does what the command of the same name does.

Actions on roll-outs and runs write a desired state into the registry, which the running server applies. Without a server the answer says
so, and names the command that acts now.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

from edge_fl.console.units import counted
from edge_fl.errors import InputError
from edge_fl.fields import EXPECTED_NAME
from edge_fl.fleet.actions import ACTING_FOR
from edge_fl.wire.topics import NAME, checked_device
from edge_fl_console.dashboard import standing
from edge_fl_console.dashboard.context import PageContext
from edge_fl_server.children import CommandProcesses
from edge_fl_server.mqtt.device_packets import one_line
from edge_fl_server.recipes.recipe import RolloutConfig
from edge_fl_server.registry import audit, fleets, registered_devices, rollouts, runs
from edge_fl_server.registry.rollouts import WayBack
from edge_fl_server.registry.tables import DesiredRolloutState, RolloutRecord
from edge_fl_server.release.rollout.stages import ALL_AT_ONCE, CAREFUL
from edge_fl_server.release.rollout.stored_rollout import request

REVOKE_S = 60.0
NUMBER = re.compile("[1-9][0-9]{0,8}")  # of a release or roll-out
MAX_TARGET = 64  # characters of a refused one in the audit log


@dataclass(frozen=True)
class Question:
    """What a dialog says before an action: its effect. Without a `word` for the button there is only `command`, which acts elsewhere."""

    title: str
    text: str
    word: str = ""
    danger: bool = False
    command: str = ""


@dataclass(frozen=True)
class PageAction:
    """`ask` states the effect on a target, `do` has it and returns a message. Both raise InputError if it is not possible any more.

    `require` raises InputError for a target that no button has: a browser may send any.
    """

    ask: Callable[[PageContext, str], Question]
    do: Callable[[PageContext, str], str]
    require: Callable[[PageContext, str], None]


def _require_number(context: PageContext, target: str) -> None:
    if not NUMBER.fullmatch(target):
        raise InputError(f"{target[:100]!r}: expected a number")


def _require_run(context: PageContext, target: str) -> None:
    if not NAME.match(target):
        raise InputError(f"run {target[:100]!r}: {EXPECTED_NAME}")


def _require_device(context: PageContext, target: str) -> None:
    if registered_devices.get(context.db, context.fleet, checked_device(target)) is None:
        raise InputError(f"{target}: no device of fleet {context.fleet}")


def command_words(record: RolloutRecord) -> str:
    """The command that does without a server what was requested of a roll-out."""
    if record.desired == "running":
        return f"release {'rollback' if record.leaves else 'rollout'} {record.release}"
    return {"paused": "release pause", "aborted": "release abort", "rolled_back": "release rollback"}[
        record.desired
    ]


def _requested(context: PageContext, what: str, number: int) -> str:
    """The message after a request on the roll-out `number`: who carries it out."""
    if fleets.presence(context.db, context.fleet).online:
        return f"{what} requested; the server carries it out."
    record = rollouts.get(context.db, number)
    command = f" To act now: {context.command(command_words(record))}" if record else ""
    return f"{what} requested; waiting for a server.{command}"


def _moving(context: PageContext, release: int, *, to: bool) -> str:
    """How many head-only devices change their release: all others `to` it, or those that run it back."""
    found = standing.on_release(context.db, context.fleet, release)
    which = "others" if to else "running"
    count, gone = found[which], found[f"{which}_gone"]
    later = f" ({gone:,} of them when {'it connects' if gone == 1 else 'they connect'})" if gone else ""
    return f"{counted(count, 'device')}{later}"


def _back_by(context: PageContext, release: int) -> WayBack | None:
    """The roll-back that starting a release is: of an older one, or of the served one after a roll-out to some devices; None for others.

    Raises InputError if the fleet cannot go back to it.
    """
    db, fleet = context.db, context.fleet
    if release > rollouts.served_release(db, fleet):
        return None
    return rollouts.way_back(db, fleet, release, context.kept())


def _returning(context: PageContext, way: WayBack) -> str:
    """From which release to which one a roll-back goes, with what they are."""
    return " → ".join(rollouts.titled(context.db, context.fleet, release) for release in (way.leaves, way.to))


def _ask_start(context: PageContext, release: str) -> Question:
    number = int(release)
    if way := _back_by(context, number):
        moving = _moving(context, number, to=True)
        text = (
            f"{_returning(context, way)}. {moving} will return from release {way.leaves} to release {number}, all at once and"
            " without stages."
        )
        return Question(f"Roll back to release {number}?", text, "Roll back", danger=True)
    return Question(f"Roll out release {number}?", _in_stages(context, number), "Roll out")


def _in_stages(context: PageContext, release: int) -> str:
    served = rollouts.served_release(context.db, context.fleet)
    back = f" and its devices return to release {served}" if served else ""
    moving = _moving(context, release, to=True)
    return f"{moving} will receive it stage by stage; a stage with bad results ends the roll-out{back}."


def _withdrawal(context: PageContext, release: int) -> str:
    """How a release was aborted or rolled back; "" if it was not."""
    record = rollouts.withdrawn(rollouts.listed(context.db, context.fleet)).get(release)
    return record.withdrawal if record else ""


def _require_none_under_way(context: PageContext, release: int) -> None:
    if current := rollouts.current(context.db, context.fleet):
        raise InputError(
            f"release {release}: the roll-out of release {current.release} has not ended; abort it first"
        )


def start(context: PageContext, release: str) -> str:
    """Request the roll-out of a release, all at once if it is a roll-back.

    Raises InputError during another roll-out, for the release that is served, and for one that was withdrawn.
    """
    number = int(release)
    _require_none_under_way(context, number)
    if withdrawal := _withdrawal(context, number):
        raise InputError(f"release {number}: {withdrawal}")
    way = _back_by(context, number)
    plan = RolloutConfig(stages=ALL_AT_ONCE if way else CAREFUL)
    begun = request(context.db, context.fleet, number, plan)
    return _requested(context, f"{'Roll-back to' if way else 'Roll-out of'} release {number}", begun)


def _ask_again(context: PageContext, release: str) -> Question:
    number = int(release)
    withdrawal = _withdrawal(context, number)
    said = f"It was {withdrawal}. " if withdrawal else ""
    return Question(
        f"Roll out release {number} again?",
        f"{said}{_in_stages(context, number)}",
        "Roll out again",
        danger=bool(said),
    )


def again(context: PageContext, release: str) -> str:
    """Request the roll-out of a release in stages, also of one that was withdrawn. Raises InputError during another roll-out."""
    _require_none_under_way(context, int(release))
    begun = request(context.db, context.fleet, int(release), RolloutConfig(stages=CAREFUL))
    return _requested(context, f"Roll-out of release {release}", begun)


def _unfinished(context: PageContext, number: str, *, returns: bool = False) -> RolloutRecord:
    """A roll-out under way. Raises InputError if it has ended, and if devices should return but there is no previous release."""
    record = rollouts.get(context.db, int(number))
    if record is None or record.fleet != context.fleet or record.state in rollouts.OVER:
        raise InputError(f"roll-out {number}: it has ended")
    if returns and not record.previous:
        raise InputError(f"release {record.release}: there is no previous release to return to")
    return record


def _way_back(context: PageContext, number: str) -> WayBack:
    """The roll-back that ends the roll-out under way. Raises InputError if that is a roll-back itself."""
    record = _unfinished(context, number, returns=True)
    way = rollouts.way_back(context.db, context.fleet)
    if way.to != record.previous:
        raise InputError(f"release {way.to}: the roll-back from release {way.leaves} is under way already")
    return way


def _ask_rollback(context: PageContext, number: str) -> Question:
    way = _way_back(context, number)
    text = (
        f"{_returning(context, way)}. {_moving(context, way.leaves, to=False)} will return from release {way.leaves} to release"
        f" {way.to}, all at once. The roll-out ends."
    )
    return Question(f"Roll back to release {way.to}?", text, "Roll back", danger=True)


def _roll_back(context: PageContext, number: str) -> str:
    way = _way_back(context, number)
    rollouts.steer(context.db, int(number), "rolled_back")
    return _requested(context, f"Roll-back to release {way.to}", int(number))


def _steer(
    desired: DesiredRolloutState, name: str, title: str, text: str, word: str, *, returns: bool = False
) -> PageAction:
    """The action that requests a state of the roll-out under way; `returns`: its devices go back to the previous release.

    `name` is that of the request in messages. In the texts, {0} is the roll-out and {moving} the devices that have its release.
    """

    def ask(context: PageContext, number: str) -> Question:
        record = _unfinished(context, number, returns=returns)
        moving = _moving(context, record.release, to=False)
        return Question(title.format(record), text.format(record, moving=moving), word, danger=returns)

    def do(context: PageContext, number: str) -> str:
        record = _unfinished(context, number, returns=returns)
        rollouts.steer(context.db, record.number, desired)
        return _requested(context, name.format(record), record.number)

    return PageAction(ask, do, _require_number)


def _ask_stop(context: PageContext, run: str) -> Question:
    return Question(
        f"Stop {run}?",
        "The run ends after the current round, keeps its results, and can be resumed.",
        "Stop the run",
        danger=True,
    )


def stop(context: PageContext, run: str) -> str:
    """Request the end of a run. Raises InputError if it has ended."""
    record = runs.get(context.db, run)
    if record is None or record.fleet != context.fleet or not runs.stop(context.db, run):
        raise InputError(f"run {run}: it is not running")
    if fleets.presence(context.db, context.fleet).online:
        return f"Run {run} stops after the current round."
    return f"Stop of {run} requested, but its server is offline. To end the run now: {context.command('server up')}"


def _ask_admit(context: PageContext, device: str) -> Question:
    why = standing.reason(context.db, context.fleet, device)
    return Question(
        f"Admit {device}?",
        f"{why} Its reports will count again, and its count of rejected reports restarts at 0. If the cause remains, it will be"
        " quarantined again.",
        "Admit",
    )


def admit(context: PageContext, device: str) -> str:
    """End the quarantine of a device. Raises InputError if it is not in quarantine any more."""
    standing.reason(context.db, context.fleet, device)
    registered_devices.readmit(context.db, context.fleet, device)
    return f"{device}: quarantine ended."


def _ask_revoke(context: PageContext, device: str) -> Question:
    text = (
        "Its certificate becomes invalid: the broker ends its connection within a second, and nothing that it sends counts. It can return"
        f" only with a new certificate (edge-fl fleet enrol {device})."
    )
    if context.identities:
        return Question(f"Revoke {device}?", text, "Revoke", danger=True)
    where = "The fleet's CA is not on this machine. Where it is, run:"
    return Question(f"Revoke {device}?", f"{text} {where}", command=f"edge-fl fleet revoke {device}")


def revoke(context: PageContext, device: str) -> str:
    """Revoke a device's certificate with the command of that name. Raises InputError without the CA, RunError if the command fails."""
    if context.identities is None:
        raise InputError(f"{device}: the CA of the fleet is not on this machine")
    person = {ACTING_FOR: context.access.person.name}
    with CommandProcesses(lambda name, line: None, person) as children:
        words = ("fleet", "revoke", "--identities", os.fspath(context.identities), "--", device)
        printed = children.wait(children.start("fleet revoke", *words), REVOKE_S)
    online = fleets.presence(context.db, context.fleet).online
    return printed + ("." if online else "; the list shows it when a server is online.")


ACTIONS = {
    "start": PageAction(_ask_start, start, _require_number),
    "again": PageAction(_ask_again, again, _require_number),
    "pause": _steer(
        "paused",
        "Pause of release {0.release}",
        "Pause the roll-out of release {0.release}?",
        "No further stage starts. {moving} with release {0.release} keep it.",
        "Pause",
    ),
    "resume": _steer(
        "running",
        "Continuation of release {0.release}",
        "Resume the roll-out of release {0.release}?",
        "The next stage starts as soon as the devices of the present one have reported.",
        "Resume",
    ),
    "abort": _steer(
        "aborted",
        "Return to release {0.previous}",
        "Abort the roll-out of release {0.release}?",
        "{moving} will return from release {0.release} to release {0.previous}; no other device receives it.",
        "Abort",
        returns=True,
    ),
    "rollback": PageAction(_ask_rollback, _roll_back, _require_number),
    "stop": PageAction(_ask_stop, stop, _require_run),
    "admit": PageAction(_ask_admit, admit, _require_device),
    "revoke": PageAction(_ask_revoke, revoke, _require_device),
}
"""By the part of a button's `data-act` before the colon; the rest is the target."""


def require(context: PageContext, name: str, target: str) -> None:
    """Check that the person may do an action, and has chosen a target that it can have; what is refused is in the audit log.

    Raises NotPermittedError, InputError.
    """
    person, shown = context.access.person, one_line(target[:MAX_TARGET])
    audit.permit(context.db, context.fleet, person, name, shown)
    try:
        ACTIONS[name].require(context, target)
    except InputError as error:
        audit.record(context.db, context.fleet, person, name, shown, str(error))
        raise


def recorded_as(context: PageContext, name: str, target: str) -> str:
    """The action that the audit log has, as with the commands: to start an earlier release is a roll-back, to start one again a start."""
    back = name == "start" and int(target) <= rollouts.served_release(context.db, context.fleet)
    return "rollback" if back else "start" if name == "again" else name
