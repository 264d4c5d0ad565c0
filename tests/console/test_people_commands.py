"""`edge-fl token`, `edge-fl fleet audit` and `edge-fl server dashboard` as commands."""

from pathlib import Path

import pytest

from edge_fl.cli import main
from edge_fl.wire.roles import local_user
from edge_fl_server.registry import Database, registered_devices
from edge_fl_server.registry.tables import DeviceRecord


@pytest.mark.parametrize(
    "command", [["server", "dashboard", "--port", "0"], ["token", "list"], ["fleet", "audit"]]
)
def test_a_mistyped_registry_is_an_error_and_not_a_new_one(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "servre" / "registry.sqlite"
    assert main([*command, "--database", str(path)]) == 4
    error = capsys.readouterr().err
    assert f"registry {path}: not there; expected the one that" in error and error.count("\n") == 1
    assert not path.parent.exists()


def test_tokens_and_admissions_by_command_are_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    db = Database.open(registry := "runs/server/registry.sqlite")
    registered_devices.record(db, [DeviceRecord("main", "pi-1", "ready")])
    where = ["--database", registry]
    assert (
        main(["token", "create", "ann", "--role", "viewer", "--role", "operator", "--days", "3", *where]) == 0
    )
    secret = capsys.readouterr().out.strip()
    assert main(["token", "create", "ann", "--role", "viewer", *where]) == 4
    assert main(["token", "create", "bo", "--role", "boss", *where]) == 4
    assert main(["token", "create", "A b", "--role", "viewer", *where]) == 4
    assert "boss: expected viewer, operator, releaser" in capsys.readouterr().err
    assert main(["token", "renew", "ann", *where]) == 0
    assert main(["token", "revoke", "ann", *where]) == 0
    registered_devices.quarantine(db, "main", "pi-1", "3 reports rejected")
    assert main(["fleet", "admit", "pi-1", *where]) == 0
    assert main(["token", "list", *where]) == 0
    printed = capsys.readouterr().out
    assert "revoked" in printed and secret not in printed
    assert main(["fleet", "audit", "--who", local_user(), "--since", "2020-01-01", *where]) == 0
    lines = capsys.readouterr().out
    for said in (
        "token create",
        "ann: viewer, operator",
        "has a valid token",
        "token renew",
        "token revoke",
        "admit",
    ):
        assert said in lines
    assert main(["fleet", "audit", "--since", "last week", *where]) == 4
    db.close()
