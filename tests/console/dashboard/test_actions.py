"""Each action states its effect, and does what the command of the same name does."""

from dataclasses import replace
from pathlib import Path

import pytest

from edge_fl.errors import InputError, RunError
from edge_fl.wire.roles import Person
from edge_fl_broker.provision.authority import Authority
from edge_fl_console.dashboard import actions
from edge_fl_console.dashboard.auth import PageAccess
from edge_fl_console.dashboard.context import PageContext
from edge_fl_console.dashboard.pages import releases
from edge_fl_server.recipes.recipe import RolloutConfig
from edge_fl_server.registry import Database, audit, fleets, registered_devices, rollouts
from edge_fl_server.registry import rollouts as released
from edge_fl_server.registry.tables import DeviceRecord, ReleaseRecord
from edge_fl_server.release.rollout.stages import CAREFUL, MIN_STAGE, rank
from edge_fl_server.release.rollout.stored_rollout import request


def test_the_first_stage_of_a_small_fleet_is_widened(tmp_path: Path) -> None:
    db = Database.open(tmp_path / "registry.sqlite")
    names = [f"pi-{number:02d}" for number in range(12)]
    registered_devices.record(
        db, [DeviceRecord("main", name, "ready", capability={"tier": "head"}) for name in names]
    )
    rollouts.advance(db, rollouts.get(db, rollouts.begin(db, "main", 1)), state="completed")
    actions.start(PageContext(db, "main"), "2")
    requested = rollouts.current(db, "main")
    first, *_, last = requested.plan["stages"]
    assert (
        sum(rank(name, 2) < first for name in names)
        == MIN_STAGE
        > sum(rank(name, 2) < CAREFUL[0] for name in names)
    )
    assert (last, requested.previous) == (1.0, 1)


@pytest.fixture
def context(tmp_path: Path) -> PageContext:
    """Twelve head-only devices on release 2 of two, one of them lost; no server."""
    db = Database.open(tmp_path / "server" / "registry.sqlite")
    registered_devices.record(
        db,
        [
            DeviceRecord(
                "main", f"pi-{n:02d}", "ready" if n else "lost", release=2, capability={"tier": "head"}
            )
            for n in range(12)
        ],
    )
    for release in (1, 2):
        released.record_release(db, ReleaseRecord("main", release, "toy", release, "fedrep", "0" * 64, 100))
        number = rollouts.begin(db, "main", release, previous=release - 1)
        rollouts.advance(db, rollouts.get(db, number), state="completed")
    return PageContext(db, "main", tmp_path / "releases", str(tmp_path / "server" / "registry.sqlite"))


def test_a_roll_back_states_how_many_devices_return_to_which_release(context: PageContext) -> None:
    asked = actions.ACTIONS["start"].ask(context, "1")
    assert (asked.title, asked.word, asked.danger) == ("Roll back to release 1?", "Roll back", True)
    assert "12 devices (1 of them when it connects) will return from release 2 to release 1" in asked.text
    number = rollouts.begin(context.db, "main", 2, previous=1)
    asked = actions.ACTIONS["rollback"].ask(context, str(number))
    assert asked.title == "Roll back to release 1?" and ". 12 devices (1 of them" in asked.text
    assert asked.text.startswith("release 2 (fedrep, round 2 of toy, published 20")
    assert " UTC) → release 1 (fedrep, round 1 of toy, published 20" in asked.text


LOSS = "mean: accuracy changed by -41.0 points, in the bottom decile of 3 devices by -60.0"


def test_a_release_that_a_gate_aborted_says_so_in_row_button_and_dialog(context: PageContext) -> None:
    released.record_release(context.db, ReleaseRecord("main", 3, "toy", 3, "fedrep", "0" * 64, 100))
    number = rollouts.begin(context.db, "main", 3, previous=2, plan={"stages": [0.5, 1.0]})
    rollouts.advance(context.db, rollouts.get(context.db, number), state="aborted", reason=LOSS)
    row = releases.read(context.db, "main", frozenset({1, 2, 3})).releases[3]
    (cell,) = (column.draw(row) for column in releases.RELEASES if column.name == "start")
    assert "aborted by a gate on 20" in cell and f"UTC in stage 1 of 2: {LOSS}" in cell
    assert 'data-act="again:3"' in cell and "Roll out again" in cell and "start:3" not in cell
    asked = actions.ACTIONS["again"].ask(context, "3")
    assert (asked.title, asked.word, asked.danger) == ("Roll out release 3 again?", "Roll out again", True)
    assert asked.text.startswith("It was aborted by a gate on ") and LOSS in asked.text
    with pytest.raises(InputError, match="release 3: aborted by a gate"):
        actions.ACTIONS["start"].do(context, "3")
    assert actions.recorded_as(context, "again", "3") == "start"
    assert "Roll-out of release 3 requested" in actions.ACTIONS["again"].do(context, "3")
    assert rollouts.current(context.db, "main").release == 3


def test_the_way_back_is_the_one_of_the_command(context: PageContext) -> None:
    """Neither the button nor what a browser sends goes back to the release that was left."""
    kept = frozenset({1, 2})
    number = int(rollouts.begin(context.db, "main", 1, previous=2))
    with pytest.raises(InputError, match="the roll-back from release 2 is under way already"):
        actions.ACTIONS["rollback"].do(context, str(number))
    rollouts.advance(context.db, rollouts.get(context.db, number), state="completed")
    page = releases.read(context.db, "main", kept)
    assert (page.served, page.back) == (1, 0)
    assert "start:2" not in releases.current(page)
    with pytest.raises(InputError, match="release 2: rolled back to release 1 on"):
        actions.ACTIONS["start"].do(context, "2")


def test_without_a_server_the_answer_names_the_command_that_acts_now(context: PageContext) -> None:
    answer = actions.start(context, "1")
    assert answer == (
        "Roll-back to release 1 requested; waiting for a server."
        f" To act now: edge-fl release rollback 1 --home {context.home}"
    )
    shown = releases.current(releases.read(context.db, "main"), context.command)
    assert "waiting for a server" in shown and answer.partition("To act now: ")[2] in shown
    fleets.begin(context.db, "main", 1)
    shown = releases.current(releases.read(context.db, "main"), context.command)
    assert "waiting" not in shown and "To act now" not in shown
    number = rollouts.current(context.db, "main").number
    answer = actions.ACTIONS["abort"].do(context, str(number))
    assert answer == "Return to release 2 requested; the server carries it out."


def test_a_first_release_has_neither_abort_nor_roll_back(context: PageContext) -> None:
    number = rollouts.begin(context.db, "main", 3)
    shown = releases.current(releases.read(context.db, "main"))
    assert f"pause:{number}" in shown and "abort:" not in shown and "rollback:" not in shown
    for name in ("abort", "rollback"):
        for part in (actions.ACTIONS[name].ask, actions.ACTIONS[name].do):
            with pytest.raises(InputError, match="no previous release to return to"):
                part(context, str(number))


def test_the_release_in_service_is_not_rolled_out_again(context: PageContext) -> None:
    with pytest.raises(InputError, match="release 2: the fleet serves it already"):
        actions.start(context, "2")
    page = releases.read(context.db, "main", frozenset({1, 2}))
    assert (page.served, page.back, page.releases[2].startable) == (2, 1, False)
    assert 'data-act="start:1"' in releases.current(page)


def test_without_server_and_files_no_release_can_be_rolled_out(context: PageContext) -> None:
    assert context.kept() is None
    page = releases.read(context.db, "main", context.kept())
    assert (page.back, page.releases[1].startable) == (0, False)
    assert "start:" not in releases.current(page)
    fleets.begin(context.db, "main", 1)  # which has the files
    assert 'data-act="start:1"' in releases.current(releases.read(context.db, "main", context.kept()))


def test_the_way_back_remains_when_the_command_repeats_a_roll_out(context: PageContext) -> None:
    number = request(context.db, "main", 2, RolloutConfig(stages=(1.0,)))
    assert rollouts.get(context.db, number).previous == 1


def test_admit_states_the_reason_and_ends_the_quarantine(context: PageContext) -> None:
    with pytest.raises(InputError, match="not in quarantine"):
        actions.ACTIONS["admit"].ask(context, "pi-03")
    registered_devices.quarantine(
        context.db, "main", "pi-03", "3 reports rejected, the last one because of norm (912)"
    )
    asked = actions.ACTIONS["admit"].ask(context, "pi-03")
    assert "the last one because its update is much larger than allowed (912)." in asked.text
    actions.ACTIONS["admit"].do(context, "pi-03")
    with pytest.raises(InputError, match="not in quarantine"):  # somebody else was faster
        actions.ACTIONS["admit"].do(context, "pi-03")
    assert registered_devices.blocked(context.db, "main") == {}


def test_revoke_acts_only_where_the_ca_is(context: PageContext) -> None:
    asked = actions.ACTIONS["revoke"].ask(context, "pi-03")
    assert (asked.word, asked.command) == ("", "edge-fl fleet revoke pi-03")
    with pytest.raises(InputError, match="not on this machine"):
        actions.revoke(context, "pi-03")
    authority = Authority.make(context.home.parent / "identities")
    authority.bake({"pi-03": context.home.parent / "identities" / "devices" / "pi-03"})
    assert actions.ACTIONS["revoke"].ask(context, "pi-03").word == "Revoke"
    assert "pi-03: 1 revoked" in actions.revoke(context, "pi-03")
    assert {row.name for row in authority.register.rows() if row.revoked} == {"pi-03"}
    with pytest.raises(RunError, match="has no valid certificate"):
        actions.revoke(context, "pi-03")


NOT_DEVICES = [
    "server",
    "operator",
    "reader",
    "registrar",
    "broker",
    "worker-1",
    "claim-1",
    "reader-1",
    "viewer-ann",
    "operator-bo",
]


@pytest.mark.parametrize(
    "name", [*NOT_DEVICES, "releaser-cy", "pi-99", "--help", "-h", "", "x" * 5000, "\ud800", "a\0b"]
)
@pytest.mark.parametrize("action", ["revoke", "admit"])
def test_an_operator_acts_on_devices_of_the_fleet_only(context: PageContext, action: str, name: str) -> None:
    """The identities of servers and people are the administrator's, and another name may be an option of the command."""
    bo = replace(context, access=PageAccess(Person("bo", "token", frozenset({"operator"}))))
    with pytest.raises(InputError, match=r"expected|no device of fleet main"):
        actions.require(bo, action, name)
    (row,) = audit.listed(context.db, "main")
    assert (row.who, row.action) == ("bo", action) and len(row.target) <= 64 and row.result != audit.DONE
    actions.require(bo, action, "pi-03")


NOT_NUMBERS = [
    "",
    "0",
    "-1",
    "+1",
    "01",
    "1.0",
    "1e9",
    "1_0",
    "٣",
    "²",
    "nan",
    "inf",
    "9" * 10,
    "9" * 5000,
    " 1",
    "1\n",
    "\ud800",
]


@pytest.mark.parametrize("action", ["start", "pause", "resume", "abort", "rollback"])
def test_a_release_or_roll_out_is_a_plain_number(context: PageContext, action: str) -> None:
    for target in NOT_NUMBERS:
        with pytest.raises(InputError, match="expected a number"):
            actions.require(context, action, target)
    actions.require(context, action, "999999999")


def test_a_name_reaches_the_command_as_a_name_only(context: PageContext) -> None:
    """Also where the check before it were missing."""
    Authority.make(context.home.parent / "identities")
    with pytest.raises(RunError, match="'--help': has no valid certificate"):
        actions.revoke(context, "--help")
