"""Content of a bundle: paths on the Pi, private keys readable only by their owner and never printed, a reproducible wheel."""

import hashlib
import io
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from edge_fl import TELEMETRY_OFF
from edge_fl.cli import main
from edge_fl.errors import ConfigError
from edge_fl.release import device_wheel
from edge_fl_broker.provision.authority import Authority
from edge_fl_devices import config as settings
from edge_fl_devices.config import DeviceConfig
from edge_fl_devices.flash import bundle
from edge_fl_devices.flash.bundle import MANIFEST, bundle_files, parse_manifest
from edge_fl_devices.flash.card_contents import IDENTITY, CardContents, read_identity, with_pi_paths
from edge_fl_devices.flash.wheels import PYTHONS, gather, pins, reads_heic

MakeContents = Callable[[tuple[str, ...]], CardContents]


def test_the_settings_on_the_pi_are_settings_that_the_agent_reads(contents: MakeContents) -> None:
    files = {file.path: file for file in bundle_files(contents(("3.11",)))}
    tree = tomllib.loads(files["edge-fl/config.toml"].read().decode())
    config = settings.convert(tree, "config.toml")
    assert (config.id, config.data, config.folder) == ("pi-07", "folder:/srv/images", "/var/lib/edge-fl")
    assert config.broker.identity == IDENTITY


def test_the_manifest_comes_last_and_lists_every_other_file(contents: MakeContents) -> None:
    files = bundle_files(contents(("3.11", "3.13")))
    assert files[-1].path == MANIFEST
    assert parse_manifest(files[-1].read().decode()) == {file.path: file.sha256 for file in files[:-1]}
    assert {"edge-fl/requirements-3.11.txt", "edge-fl/requirements-3.13.txt"} < {file.path for file in files}


def test_keys_are_readable_only_by_their_owner_and_never_shown(contents: MakeContents) -> None:
    planned = contents(("3.11",))
    files = {file.path: file for file in bundle_files(planned)}
    assert files["edge-fl/identity/client.key"].mode == 0o600
    assert b"PRIVATE KEY" in files["edge-fl/identity/client.key"].read()
    assert "PRIVATE KEY" not in f"{files} {planned!r}"


def test_an_identity_that_is_incomplete_or_another_devices_is_rejected(identity: Path) -> None:
    with pytest.raises(ConfigError, match=r"is the identity of pi-07, not of pi-08; nothing was changed"):
        read_identity(identity, "pi-08")
    (identity / "client.key").unlink()
    with pytest.raises(ConfigError, match=r"client\.key: No such file"):
        read_identity(identity, "pi-07")


def test_a_claim_is_taken_along_with_its_token(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "home")
    authority.claim({"pi-07": tmp_path / "claim"})
    assert set(read_identity(tmp_path / "claim", "pi-07")) == {"ca.crt", "client.crt", "client.key", "token"}


@pytest.mark.parametrize("data", ["folder:/home/pi/images", "/root/x", "npz:/tmp/a.npz"])
def test_data_folders_that_the_service_cannot_read_are_rejected(data: str) -> None:
    with pytest.raises(ConfigError, match="no home or temporary folder"):
        with_pi_paths(DeviceConfig("pi-07", data), identified=False, root=False)


def test_our_wheel_is_reproducible_and_installable_by_pip(tmp_path: Path) -> None:
    name, content = device_wheel.pack()
    assert device_wheel.pack() == (name, content)
    with zipfile.ZipFile(io.BytesIO(content)) as wheel:
        assert wheel.testzip() is None
        names = set(wheel.namelist())
        assert {"edge_fl_devices/agent/step.py", "edge_fl_devices/flash/install.sh", "edge_fl/cli.py"} < names
        packages = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
        assert packages - {"edge_fl_maker"} == {"edge_fl", "edge_fl_devices"}
        (points,) = (wheel.read(name).decode() for name in names if name.endswith("/entry_points.txt"))
        assert "edge_fl_devices.cli" in points and "edge_fl_server" not in points
        assert ("edge_fl_maker.cli" in points) == ("edge_fl_maker" in packages)
    (tmp_path / name).write_bytes(content)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run(
        [*command, "--target", str(tmp_path / "site"), str(tmp_path / name)], check=True, timeout=60
    )
    assert (tmp_path / "site" / "bin" / "edge-fl").exists()
    assert "torch" not in " ".join(pins()) and any(pin.startswith("onnxruntime==") for pin in pins())


def test_the_heic_decoder_is_put_on_the_device_if_it_is_installed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def distribution(name: str, version: str, *requires: str) -> None:
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *requires]
        (folder / "METADATA").write_text("\n".join(lines))

    extras = ('pillow-heif>=0.22; extra == "heic"', 'torch>=2; extra == "full"')
    distribution("edge_fl", "0.1", *(f"Requires-Dist: {extra}" for extra in extras))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert (pins(), reads_heic()) == ([], False)
    distribution("pillow_heif", "1.8.1")
    distribution("torch", "2.11")
    assert (pins(), reads_heic()) == (["pillow-heif==1.8.1"], True)


def test_what_is_installed_is_pinned_by_hash(wheels: Path) -> None:
    house = gather(tuple(PYTHONS.values()), wheels, offline=False)
    lines = house.requirements["3.13"].splitlines()
    assert "--require-hashes" in lines and "--no-index" not in lines
    assert all("--hash=sha256:" in line for line in lines if not line.startswith("--") and line)
    (own,) = (line for line in lines if line.startswith("./wheels/edge_fl-"))
    assert own.endswith(hashlib.sha256(house.files[0].read_bytes()).hexdigest())
    assert [file.name.split("-")[0] for file in house.files] == ["edge_fl", "pip"]


def test_a_unit_switches_the_telemetry_of_dependencies_off() -> None:
    lines = bundle.service("192.168.1.10").splitlines()
    service = lines[lines.index("[Service]") : lines.index("[Install]")]
    assert {f"Environment={name}={value}" for name, value in TELEMETRY_OFF.items()} <= set(service)


def test_a_unit_may_reach_only_the_brokers_address_or_any_address_for_a_name() -> None:
    assert "IPAddressDeny=any\nIPAddressAllow=localhost\nIPAddressAllow=192.168.1.10\n" in bundle.service(
        "192.168.1.10"
    )
    assert "IPAddressAllow=2001:db8::1\n" in bundle.service("2001:db8::1")
    by_name = [line for line in bundle.service("broker.local").splitlines() if not line.startswith("#")]
    assert not any("IPAddress" in line for line in by_name)
    assert "~@resources" not in [line.partition("=")[2] for line in by_name]


def test_the_label_page_is_a_service_of_the_agents_account_and_off_unless_asked_for(
    contents: MakeContents,
) -> None:
    planned = contents(("3.11",))
    files = {file.path: file.read().decode() for file in bundle_files(planned) if "wheels/" not in file.path}
    unit = files["edge-fl/edge-fl-label.service"].splitlines()
    assert {
        "User=edge-fl",
        'ReadWritePaths="-/srv/images"',
        "NoNewPrivileges=yes",
        "IPAddressDeny=any",
    } <= set(unit)
    assert not any(
        "@" in line.replace("@system-service", "").replace("~@privileged", "")
        for line in unit[:-1]
        if not line.startswith("#")
    )
    assert "label= #" in files["edge-fl/install.sh"]
    asked = {file.path: file for file in bundle_files(replace(planned, label_page=True))}
    assert "label=yes #" in asked["edge-fl/install.sh"].read().decode()
    archive = replace(planned, config=DeviceConfig("pi-07", "npz:/srv/images.npz"))
    assert "edge-fl/edge-fl-label.service" not in {file.path for file in bundle_files(archive)}


def test_the_label_page_needs_a_folder_of_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "flash",
        "--id",
        "pi-07",
        "--out",
        str(tmp_path / "out"),
        "--host",
        "pi.local",
        "--insecure",
    ]
    assert main([*command, "--data", "npz:/srv/images.npz", "--label-page"]) == 4
    assert "--label-page: data npz:/srv/images.npz are no folder such as" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
