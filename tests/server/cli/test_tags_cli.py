"""The commands on tags and groups, and the confirmation of selectors that match no device or all."""

import json
from pathlib import Path

import pytest

from edge_fl.cli import main
from edge_fl_server.registry import Database, registered_devices, registered_tags, rollouts
from edge_fl_server.registry.tables import DeviceRecord
from edge_fl_server.release.rollout.commands import ReleaseCommands


@pytest.fixture
def registry(tmp_path: Path) -> str:
    path = str(tmp_path / "registry.sqlite")
    db = Database.open(path)
    registered_devices.record(db, [DeviceRecord("main", f"pi-{number}", "ready") for number in range(3)])
    db.close()
    return path


def fleet(registry: str, *arguments: str) -> int:
    return main(["fleet", *arguments, "--database", registry])


def of_devices(registry: str) -> dict[str, dict[str, str]]:
    db = Database.open(registry)
    found = registered_tags.of_devices(db, "main")
    db.close()
    return found


def test_tags_are_set_and_removed_by_name_and_by_selector(
    registry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fleet(registry, "tag", "pi-0", "site=berlin", "line=2") == 0
    assert fleet(registry, "tag", "not site=*", "site=paris") == 0
    said = capsys.readouterr()
    assert said.out.split() == ["pi-0", "pi-1", "pi-2"]
    assert said.err.splitlines()[1] == "not site=*: 2 of 3 devices"
    assert fleet(registry, "tag", "site=paris and pi-1", "site-", "line=1") == 0
    assert of_devices(registry) == {
        "pi-0": {"line": "2", "site": "berlin"},
        "pi-1": {"line": "1"},
        "pi-2": {"site": "paris"},
    }


def test_a_selector_of_all_devices_or_none_is_confirmed(
    registry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fleet(registry, "tag", "pi-*", "site=berlin") == 4
    assert "selector 'pi-*': matches all 3 devices; expected --yes to tag them" in capsys.readouterr().err
    assert fleet(registry, "tag", "pi-*", "site=berlin", "--yes") == 0
    assert len(of_devices(registry)) == 3
    capsys.readouterr()
    assert fleet(registry, "tag", "sites=berlin", "line=2", "--yes") == 4
    error = capsys.readouterr().err
    assert "matches none of 3 devices; no device has the tag 'sites' (did you mean 'site'?)" in error


def test_groups_are_saved_listed_changed_and_removed(
    registry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fleet(registry, "group", "save", "first", "pi-0,pi-1") == 0
    assert fleet(registry, "group", "save", "second", "@first and not pi-0") == 0
    assert capsys.readouterr().err.splitlines() == ["@first: 2 devices", "@second: 1 device"]
    assert fleet(registry, "group", "save", "first", "@second") == 4
    assert "expected a group that does not contain itself" in capsys.readouterr().err
    assert fleet(registry, "group", "list", "--format", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["group"], row["devices"]) for row in rows] == [("first", 2), ("second", 1)]
    assert fleet(registry, "group", "remove", "first") == 4
    assert "group 'first': used by @second" in capsys.readouterr().err
    assert fleet(registry, "group", "remove", "second") == 0
    assert fleet(registry, "group", "remove", "second") == 4
    assert fleet(registry, "group", "save", "No Name", "pi-0") == 4


def test_a_roll_out_to_no_device_is_confirmed_before_a_broker_is_needed(
    releases: ReleaseCommands, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registered_devices.record(releases.db, [DeviceRecord("main", "pi-0"), DeviceRecord("main", "pi-1")])
    command = ["release", "rollout", "2", "--home", str(tmp_path / "home"), "--host", "nowhere.invalid"]
    assert main([*command, "--where", "site=berlin"]) == 4
    error = capsys.readouterr().err
    assert "selector 'site=berlin': matches none of 2 devices; no device has the tag 'site'" in error
    assert "expected --yes to roll out to them" in error
    assert main([*command, "--where", "site=berlin and"]) == 4
    assert "position 16: ends" in capsys.readouterr().err
    assert len(rollouts.listed(releases.db, "main")) == 1
