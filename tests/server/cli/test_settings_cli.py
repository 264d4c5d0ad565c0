"""`edge-fl fleet set` and `fleet settings`: checks, confirmation, roles and the audit log, desired and actual settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from edge_fl.cli import main
from edge_fl.fleet.remote_settings import DesiredSettings
from edge_fl_server.registry import Database, audit, registered_devices
from edge_fl_server.registry.tables import DeviceRecord

APPLIED = {"serial": 2**52, "settings": {"keep": {"origin": "remote", "value": 5}}}
REPORTS: dict[str, dict[str, Any] | None] = {
    "applied": {"settings": APPLIED},
    "waiting for the device": {"settings": {"serial": 1}},
    "not in effect": {"settings": {"serial": 2**52}},
    "changed on the device": {
        "settings": {
            "serial": 2**52,
            "settings": {"keep": {"origin": "local", "value": 9, "why": "changed on the device"}},
        }
    },
    "rejected by the device: forged": {"settings": {"why": "forged"}},
    "a simulated device has fixed settings": {"settings": {"why": "fixed"}},
}


@pytest.fixture
def registry(tmp_path: Path) -> str:
    path = str(tmp_path / "registry.sqlite")
    db = Database.open(path)
    records = [
        DeviceRecord("main", f"pi-{number}", "ready", capability=report)
        for number, report in enumerate(REPORTS.values())
    ]
    registered_devices.record(db, records)
    db.close()
    return path


def fleet(registry: str, *arguments: str) -> int:
    return main(["fleet", *arguments, "--database", registry])


def desired(registry: str) -> dict[str, DesiredSettings]:
    db = Database.open(registry)
    found = registered_devices.desired_settings(db, "main")
    db.close()
    return found


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("watch_s=-5", "watch_s = -5"),
        ("watch=5", "did you mean 'watch_s'?"),
        ("watch_s", "such as watch_s=60"),
        ("data=/srv/images", "expected folder:/PATH"),
        ("keep=many", "keep = 'many'"),
        ("uploads=true", "can be set from afar"),
        ("head=logistik", "did you mean 'logistic'?"),
    ],
)
def test_a_value_out_of_range_or_an_unknown_setting_changes_nothing(
    registry: str, change: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fleet(registry, "set", "pi-1", "keep=5", change) == 4
    assert named in capsys.readouterr().err
    assert not desired(registry)


def test_a_selector_of_all_devices_is_confirmed_and_of_none_rejected(
    registry: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fleet(registry, "set", "pi-*", "keep=5") == 4
    assert "matches all 6 devices; expected --yes to change their settings" in capsys.readouterr().err
    assert fleet(registry, "set", "site=berlin", "keep=5", "--yes") == 4
    assert "matches none of 6 devices" in capsys.readouterr().err
    assert not desired(registry)
    assert fleet(registry, "set", "pi-*", "keep=5", "--yes") == 0
    assert len(desired(registry)) == 6
    db = Database.open(registry)
    assert {(row.action, row.target) for row in audit.listed(db, "main")} == {("settings", "pi-*: keep=5")}
    db.close()


def test_values_are_read_as_in_a_settings_file_and_taken_back_with_a_higher_serial(registry: str) -> None:
    changes = ("classes=cat,dog", "budget.megabytes=50", "balanced=true", "broker.host=10.0.0.7", "head=auto")
    assert fleet(registry, "set", "pi-0,pi-1", *changes) == 0
    first = desired(registry)["pi-0"]
    assert first.values == {
        "balanced": True,
        "broker.host": "10.0.0.7",
        "budget.megabytes": 50,
        "classes": ["cat", "dog"],
        "head": "auto",
    }
    assert fleet(registry, "set", "pi-0", "head=", "classes=", "balanced=", "broker.host=") == 0
    after = desired(registry)["pi-0"]
    assert after.values == {"budget.megabytes": 50} and after.serial > first.serial
    assert desired(registry)["pi-1"] == first
    assert fleet(registry, "set", "pi-0", "budget.megabytes=") == 0
    assert desired(registry)["pi-0"].values == {}  # still sent: the device has to learn of it


def test_each_state_of_a_device_is_shown(registry: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fleet(registry, "set", "pi-*", "keep=5", "--yes") == 0
    capsys.readouterr()
    assert fleet(registry, "settings", "--format", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == list(REPORTS)
    assert [(row["desired"], row["actual"]) for row in rows][:2] == [(5, 5), (5, 0)]
    assert fleet(registry, "settings", "pi-3") == 0
    assert (
        capsys.readouterr().out.splitlines()[1].split() == "pi-3 keep 5 9 local changed on the device".split()
    )
    assert fleet(registry, "settings", "pi-9") == 4
