"""Enrolling more devices continues their numbers."""

import shutil
from pathlib import Path

import pytest

from edge_fl import cli
from edge_fl_broker.provision.authority import Authority


def enrol(home: Path, *options: str) -> int:
    return cli.main(["fleet", "enrol", "--identities", str(home), *options])


def folders(home: Path) -> list[str]:
    return sorted(folder.name for folder in (home / "devices").iterdir())


def test_fifty_more_devices_continue_the_numbers_and_those_of_removed_ones_are_not_used_again(
    tmp_path: Path,
) -> None:
    home = tmp_path / "ca"
    assert enrol(home, "--count", "3") == 0 == enrol(home, "--count", "2")
    assert folders(home) == [f"device-00{number}" for number in range(5)]
    authority = Authority.open(home)
    authority.revoke("device-004")
    shutil.rmtree(home / "devices" / "device-004")
    assert enrol(home, "--count", "50") == 0
    assert folders(home) == [f"device-{number:03d}" for number in (0, 1, 2, 3, *range(5, 55))]


def test_numbers_follow_a_fleets_own_names_and_other_prefixes_and_folders_are_counted_apart(
    tmp_path: Path,
) -> None:
    home = tmp_path / "ca"
    assert enrol(home, "pi-07", "pi-08", "pi-x1", "--count", "2", "--prefix", "pi-") == 0
    (home / "devices" / "cam-4").mkdir()  # of another authority
    assert enrol(home, "--count", "1", "--prefix", "cam-") == 0 == enrol(home, "--count", "1")
    assert folders(home) == [
        "cam-4", "cam-5", "device-000", "pi-07", "pi-08", "pi-09", "pi-10", "pi-x1",
    ]  # fmt: skip


def test_a_total_may_be_repeated_and_replaces_what_was_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "ca"
    assert enrol(home, "--total", "3") == 0 == enrol(home, "--total", "3")
    assert "3 devices device-N are enrolled; nothing was changed" in capsys.readouterr().err
    Authority.open(home).revoke("device-001")
    assert enrol(home, "--total", "3") == 0
    assert folders(home) == [f"device-00{number}" for number in range(4)]
    assert enrol(home, "--total", "3", "--count", "2") == 4


def test_invalid_names_create_no_authority(tmp_path: Path) -> None:
    assert enrol(tmp_path / "ca") == 4 == enrol(tmp_path / "ca", "pi-1", "pi-1")
    assert not (tmp_path / "ca").exists()
