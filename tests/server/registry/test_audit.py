"""The audit log: rows are added by every way to act, and can be neither changed nor deleted."""

from pathlib import Path

import pytest
from sqlalchemy import text

from edge_fl.errors import InputError, RunError
from edge_fl.files.accounts import local_user
from edge_fl.wire.roles import ADMINISTRATOR, NotPermittedError, Person, local_person
from edge_fl_broker.provision.authority import Authority
from edge_fl_server.cli.options import acting_as
from edge_fl_server.recipes.recipe import RolloutConfig
from edge_fl_server.registry import Database, audit, rollouts
from edge_fl_server.release.rollout.commands import ReleaseCommands

ANN = Person("ann", "token", frozenset({"viewer"}))


@pytest.mark.parametrize("verb", ["UPDATE audit SET who = 'bo'", "DELETE FROM audit"])
def test_rows_are_only_added(database_url: str, verb: str) -> None:
    db = Database.open(database_url)
    with pytest.raises(InputError), audit.acting(db, "main", local_person(), "admit", "pi-1"):
        raise InputError("no device 'pi-1'")
    refused = pytest.raises(NotPermittedError, match=r"admit: ann .token. has viewer, expected operator")
    with refused, audit.acting(db, "main", ANN, "admit", "pi-1"):
        raise AssertionError("must not run")
    audit.record(db, "main", ANN, "view", "", "done")
    with pytest.raises(RunError, match="append-only"), db.writing() as connection:
        connection.execute(text(verb))
    rows = audit.listed(db, "main")
    assert [(row.who, row.known_by, row.action, row.target) for row in rows] == [
        ("ann", "token", "view", ""),
        ("ann", "token", "admit", "pi-1"),
        (local_user(), "local user", "admit", "pi-1"),
    ]
    assert rows[2].result == "no device 'pi-1'; nothing was changed"
    assert audit.listed(db, "main", who="ann") == rows[:2] and audit.listed(db, "main", since="2999") == []
    db.close()


def test_commands_act_as_their_identity(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "home")
    (bo,) = authority.enrol_people("releaser", ["bo"], tmp_path)
    person = acting_as(bo.folder)
    assert (person.name, person.known_by, person.roles) == ("releaser-bo", "certificate", {"releaser"})
    person.require("publish")
    with pytest.raises(
        NotPermittedError, match=r"revoke: releaser-bo .certificate. has releaser, expected operator"
    ):
        person.require("revoke")
    assert acting_as(tmp_path / "home" / "operator") == Person("operator", ADMINISTRATOR)
    acting_as(tmp_path / "home" / "operator").require("token create")
    with pytest.raises(NotPermittedError, match="expected the administrator"):
        person.require("token create")


def test_a_refused_roll_out_is_in_the_log_before_anything_connects(tmp_path: Path) -> None:
    db = Database.open()
    number = rollouts.begin(db, "main", 2, previous=1)
    connect = pytest.fail
    viewer = ReleaseCommands(connect, "main", tmp_path, db, ANN)
    operator = ReleaseCommands(
        connect, "main", tmp_path, db, Person("bo", "certificate", frozenset({"operator"}))
    )
    for refused in (
        lambda: viewer.steer("paused"),
        lambda: viewer.roll_out(None, RolloutConfig()),
        lambda: operator.roll_out(None, RolloutConfig()),
        lambda: operator.roll_back(rollouts.WayBack(2, 1)),
    ):
        with pytest.raises(NotPermittedError):
            refused()
    assert [(row.who, row.action, row.target) for row in reversed(audit.listed(db, "main"))] == [
        ("ann", "pause", "release 2"),
        ("ann", "resume", "release 2"),
        ("bo", "resume", "release 2"),
        ("bo", "rollback", "release 2"),
    ]
    assert operator.steer("paused")() == number and rollouts.get(db, number).desired == "paused"
    assert audit.listed(db, "main")[0].result == audit.DONE
