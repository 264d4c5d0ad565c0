"""Every command that changes something is in the audit log under its own name, or has a reason why not."""

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import typer

from edge_fl.cli import ENTRY_POINTS, load, main
from edge_fl.fleet import actions as certificate_actions
from edge_fl.wire.roles import ACTIONS, Person
from edge_fl_console.dashboard import actions as dashboard
from edge_fl_server.mqtt.journal import Journal
from edge_fl_server.registry import Database, audit, fleets, registered_devices
from edge_fl_server.registry.tables import DeviceRecord
from edge_fl_server.release.repository import Repository

READS = frozenset({"view", "audit", "command"})
"""Rights that are no actions of people: what they read and send with other programs."""
RECORDED = {
    "broker certificate": "rotate",
    "device diagnose": "diagnose",
    "device logs": "diagnose",
    "fleet admit": "admit",
    "fleet alerts silence": "silence",
    "fleet decommission": "decommission",
    "fleet enrol": "enrol",
    "fleet group remove": "group remove",
    "fleet group save": "group save",
    "fleet rename": "rename",
    "fleet revoke": "revoke",
    "fleet rotate": "rotate",
    "fleet set": "settings",
    "fleet tag": "tag",
    "flash": "enrol",
    "release abort": "abort",
    "release agent": "publish",
    "release export": "export",
    "release keys add": "keys add",
    "release keys rotate": "keys rotate",
    "release keys take-out": "keys take-out",
    "release pause": "pause",
    "release publish": "publish",
    "release rollback": "rollback",
    "release rollout": "start",
    "server run": "run",
    "server up": "adopt",
    "token create": "token create",
    "token renew": "token renew",
    "token revoke": "token revoke",
}
UNRECORDED = {
    "Everything here reads, or changes files of the person who runs it, no fleet.": (
        "compare", "data", "datasets", "demo", "fleet alerts list", "fleet alerts test", "fleet audit", "fleet certificates",
        "fleet changes", "fleet traffic", "release compare", "server backup",
        "fleet group list", "fleet list", "fleet settings", "heads", "methods", "models", "new", "newtask", "plots", "recipes", "recommend",
        "release agents", "release keys list", "release list", "release sign", "release wheel", "report", "runs",
        "server dashboard", "server mcp", "simulate", "token list",
    ),
    "The parts of the system that run; a server's presence is in the registry.": ("broker", "fleet up", "server worker"),
    "Commands on a device, which has no registry.": ("device",),
}  # fmt: skip


def commands(app: typer.Typer, before: str = "") -> Iterator[str]:
    for info in app.registered_commands:
        yield f"{before}{info.name}"
    for group in app.registered_groups:
        assert group.typer_instance
        yield from commands(group.typer_instance, f"{before}{group.name} ")


def test_every_command_is_recorded_or_has_a_reason_why_not() -> None:
    ours = [
        point for point in metadata.entry_points(group=ENTRY_POINTS) if point.value.startswith("edge_fl_")
    ]
    every = set(commands(load(ours).root))
    reasons = [words for several in UNRECORDED.values() for words in several]
    missing = {
        command
        for command in every - RECORDED.keys()
        if not any(command == words or command.startswith(f"{words} ") for words in reasons)
    }
    assert not missing, "commands that are neither recorded nor have a reason"
    assert not RECORDED.keys() - every, "commands that do not exist"
    assert set(RECORDED.values()) | set(dashboard.ACTIONS) == set(ACTIONS) - READS


def test_commands_and_the_certificate_authority_record_their_actions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    db = Database.open("runs/server/registry.sqlite")
    fleets.claim(db, "main")
    Repository(Path("runs/releases/main"))
    registered_devices.record(db, [DeviceRecord("main", f"pi-{number}", "ready") for number in range(5)])
    registered_devices.quarantine(db, "main", "pi-1", "3 reports rejected")
    done = [
        ("fleet enrol pi-0 --baked", "enrol", "pi-0"),
        ("fleet enrol --role viewer ann", "enrol", "viewer-ann"),
        ("fleet rotate runs/identities/devices/pi-0", "rotate", "pi-0"),
        ("fleet revoke pi-0", "revoke", "pi-0"),
        ("broker certificate --add elsewhere.example", "rotate", "broker"),
        ("fleet admit pi-1", "admit", "pi-1"),
        ("fleet tag pi-1 site=berlin", "tag", "pi-1: site=berlin"),
        ("fleet set pi-1 watch_s=60", "settings", "pi-1: watch_s=60"),
        ("fleet group save all tier=head", "group save", "@all: tier=head"),
        ("fleet group remove all", "group remove", "@all"),
        ("fleet alerts silence pi-1 --for 2h", "silence", "pi-1, for 2h"),
        ("fleet decommission pi-2 --yes", "decommission", "pi-2"),
        ("fleet rename pi-3 kitchen --yes", "rename", "pi-3 to kitchen"),
        ("token create bo --role viewer", "token create", "bo: viewer"),
        ("token revoke bo", "token revoke", "bo"),
        ("release keys rotate timestamp", "keys rotate", "timestamp"),
        ("release keys take-out root --out usb", "keys take-out", "root"),
        ("release export public", "export", "public"),
    ]
    for words, _, _ in done:
        assert main(words.split()) == 0, words
    with Journal(db, "main", denied=Path("runs/identities/server/denied")):
        pass
    with Journal(db, "main", denied=Path("runs/identities/server/denied")):
        pass  # enters nothing twice
    rows = [(row.action, row.target) for row in audit.listed(db, "main")]
    assert sorted(rows) == sorted([*((action, target) for _, action, target in done), ("enrol", "kitchen")])
    assert {row.result for row in audit.listed(db, "main")} == {"done"}


def test_a_command_that_finds_nothing_to_do_is_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    db = Database.open("runs/server/registry.sqlite")
    registered_devices.record(db, [DeviceRecord("main", f"pi-{number}", "ready") for number in range(3)])
    registered_devices.quarantine(db, "main", "pi-0", "3 reports rejected")
    registered_devices.remove(db, "main", "pi-2", "decommissioned")
    for words in (
        "fleet admit pi-0",
        "fleet admit pi-1",
        "fleet admit pi-0",
        "fleet decommission pi-2 --yes",
    ):
        assert main(words.split()) == 0
    assert [(row.action, row.target) for row in audit.listed(db, "main")] == [("admit", "pi-0")]
    assert "pi-1: not in quarantine; nothing was changed" in capsys.readouterr().err
    assert main(["fleet", "admit", "pi-2"]) == 0
    assert "pi-2: in the fleet again" in capsys.readouterr().err


def test_a_revocation_from_the_dashboard_has_one_row_of_who_did_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = Database.open()
    monkeypatch.setenv(certificate_actions.ACTING_FOR, "ann")
    certificate_actions.note(tmp_path, "revoke", ["pi-1"])
    with (tmp_path / certificate_actions.ACTIONS_FILE).open("ab") as file:
        file.write(b"{cut\n")
    with audit.acting(db, "main", Person("ann", "token", frozenset({"operator"})), "revoke", "pi-1"):
        pass
    audit.enter(db, "main", certificate_actions.read(tmp_path / certificate_actions.ACTIONS_FILE))
    assert [(row.who, row.known_by) for row in audit.listed(db, "main")] == [("ann", "token")]
