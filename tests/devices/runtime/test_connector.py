"""A device has the name on its certificate; a simulated fleet takes its names from the given identities."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.provision.authority import Authority
from devices import config
from devices.runtime.connector import fleet_connector
from edge_fl.cli import main
from edge_fl.errors import ConfigError


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "home")


def test_the_name_on_the_certificate_is_the_device(authority: Authority, tmp_path: Path) -> None:
    authority.bake({"pi-1": tmp_path / "pi-1"})
    authority.claim({"pi-2": tmp_path / "pi-2"})
    for name in ("pi-1", "pi-2"):
        settings: dict[str, object] = {"data": "d", "broker": {"identity": str(tmp_path / name)}}
        assert config.with_certificate_name(settings, "here")["id"] == name
        with pytest.raises(ConfigError, match=f"here: id = 'other', but the identity .* is that of '{name}'"):
            config.with_certificate_name({**settings, "id": "other"}, "here")
    assert config.with_certificate_name({"id": "pi-3"}, "here") == {"id": "pi-3"}


def test_a_fleet_takes_the_devices_among_the_identities_in_order(
    authority: Authority, tmp_path: Path
) -> None:
    folder = tmp_path / "ids"
    authority.bake({name: folder / name for name in ("pi-2", "pi-1", "pi-3")})
    authority.claim({"pi-0": folder / "pi-0"})
    assert fleet_connector("127.0.0.1", 0, folder, 2)[0] == ("pi-1", "pi-2")
    with pytest.raises(ConfigError, match=r"3 identities of devices, expected 4.*fleet enrol --baked -n 4"):
        fleet_connector("127.0.0.1", 0, folder, 4)


def test_a_missing_identity_is_one_line_and_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = str(tmp_path / "nowhere")
    for command in (
        ["device", "run", "--data", "d.npz", "--identity", nowhere],
        ["fleet", "list", "--identity", nowhere],
        ["server", "run", "demo", "--identity", nowhere],
    ):
        assert main(command) == 4
        assert capsys.readouterr().err.count("\n") == 1
