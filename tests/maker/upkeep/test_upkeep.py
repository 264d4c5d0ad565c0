"""Reset, backup, restore and removal of a device: what goes, what stays, and what is rejected."""

import io
import os
import tarfile
from pathlib import Path

import msgspec
import pytest

from edge_fl.cli import main
from edge_fl.errors import InputError
from edge_fl_devices.config import DeviceBroker, DeviceConfig, remember, remembered
from edge_fl_devices.storage.store import Store
from edge_fl_maker.upkeep import backups
from edge_fl_maker.upkeep.device_folder import LEARNED, LEDGERS, RECORDS
from edge_fl_maker.upkeep.uninstalling import installed, left_by_dependencies, uninstall
from tests.maker.labelling import fruit

FOLDERS = {
    *("heads", "immediate", "own", "outbox", "release", "features", "labelling", "drift"),
    *("statistics", "tuf"),
}


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A device's folder with one file of each kind, its pictures and its identity."""
    folder, identity = tmp_path / "device", tmp_path / "identity"
    for name in (*LEARNED, *RECORDS, *LEDGERS, "unlabelled/a.jpg", "own-notes.txt"):
        path = folder / (f"{name}/file.json" if name in FOLDERS else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    for name in ("cat/1.png", "dog/2.jpg", "dog/notes.txt"):
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    identity.mkdir()
    for name in ("ca.crt", "client.crt", "client.key"):
        (identity / name).write_text(name)
    broker = DeviceBroker(identity=str(identity))
    remember(DeviceConfig("pi-01", f"folder:{tmp_path / 'pictures'}", folder=str(folder), broker=broker))
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {"lock"}


def test_a_reset_keeps_identity_ledgers_pictures_and_foreign_files(device: Path) -> None:
    assert main(["device", "reset", "--dir", str(device), "--yes"]) == 0
    kept = {
        "privacy.safetensors",
        "remote.json",
        "statistics/file.json",
        "tuf/file.json",
        "unlabelled/a.jpg",
        "own-notes.txt",
    }
    assert files(device) == kept
    assert len(files(device.parent / "identity")) == 3 and len(files(device.parent / "pictures")) == 3


def test_flags_also_delete_pictures_and_identity(device: Path) -> None:
    assert (
        main(["device", "reset", "--dir", str(device), "--delete-labels", "--delete-identity", "--yes"]) == 0
    )
    assert files(device) == {"own-notes.txt"} and not files(device.parent / "identity")
    assert files(device.parent / "pictures") == {"dog/notes.txt"}


def test_a_reset_deletes_no_picture_behind_a_link_to_a_folder(device: Path) -> None:
    disk, pictures = device.parent / "disk", device.parent / "pictures"
    disk.mkdir()
    (disk / "1.png").write_text("x")
    (pictures / "bird").symlink_to(disk)
    (pictures / "dog" / "3.png").symlink_to(disk / "1.png")
    assert main(["device", "reset", "--dir", str(device), "--delete-labels", "--yes"]) == 0
    assert files(disk) == {"1.png"} and {path.name for path in pictures.rglob("*.*")} == {"notes.txt"}


def test_a_reset_asks_and_needs_a_stopped_agent(device: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(device)
    assert main(["device", "reset", "--dir", str(device)]) == 4
    assert "expected --yes; nothing was changed" in capsys.readouterr().err
    with Store(device).owned():
        assert main(["device", "reset", "--dir", str(device), "--yes"]) == 4
        assert main(["device", "backup", str(device.parent / "b"), "--dir", str(device)]) == 4
    assert "another agent runs in this folder; expected it to be stopped" in capsys.readouterr().err
    assert main(["device", "reset", "--dir", str(device.parent), "--yes"]) == 4
    assert "expected the folder of a device" in capsys.readouterr().err
    assert files(device) == before


@pytest.fixture
def labelled(tmp_path: Path) -> DeviceConfig:
    """A device with a head, an immediate head, labels, a discarded picture and pictures without labels, made by the real parts."""
    config = fruit.device(tmp_path)
    home, data = Path(config.folder), Path(config.data.removeprefix("folder:"))
    truth = fruit.fill(config, 2)
    with fruit.desk(config) as desk:
        for _ in range(4):
            shown = desk.session.view("me").item
            assert shown
            desk.session.label("me", shown.name, shown.version, truth[shown.name])
            desk.learned()
        shown = desk.session.view("me").item
        assert shown
        desk.session.discard("me", shown.name, shown.version)
        desk.learned()
        (immediate,) = (home / "immediate").iterdir()
        (home / "heads").mkdir()
        (home / "heads" / immediate.name).write_bytes(immediate.read_bytes())
        remember(config)
        assert main(["device", "reset", "--dir", str(home), "--yes"]) == 4, "the page runs"
    assert len(files(data)) == 4 and len(files(home / "labelling" / "discarded")) == 1
    return config


@pytest.mark.parametrize("root", ["", "/etc/edge-fl/root.json"])
def test_a_reset_of_the_trust_leaves_all_that_the_device_learned(
    device: Path, root: str, capsys: pytest.CaptureFixture[str]
) -> None:
    known = remembered(device)
    assert known
    remember(msgspec.structs.replace(known, root=root))
    before = files(device)
    assert main(["device", "reset", "--trust", "--dir", str(device), "--yes"]) == 0
    assert before - files(device) == {"remote.json", "tuf/file.json", "outbox/file.json"}
    assert (root or "the first server that it meets") in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [(), ("--delete-labels",), ("--delete-identity",), ("--delete-labels", "--delete-identity")]
)
def test_a_reset_of_a_device_that_learned_leaves_only_what_is_documented(
    labelled: DeviceConfig, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    home, data = Path(labelled.folder), Path(labelled.data.removeprefix("folder:"))
    unlabelled = {name for name in files(home) if name.startswith("unlabelled/")}
    assert main(["device", "reset", "--dir", str(home), "--yes", *options]) == 0
    assert files(home) == (set() if "--delete-labels" in options else unlabelled) and len(unlabelled) > 7
    assert len(files(data)) == (0 if "--delete-labels" in options else 4)
    said = capsys.readouterr().err
    assert ("pictures and their labels" in said) is ("--delete-labels" not in options)
    assert ("settings from the operator" in said) is ("--delete-identity" not in options)


def test_labels_are_deleted_after_a_reset_too_where_the_board_has_its_settings(
    labelled: DeviceConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home, data = Path(labelled.folder), Path(labelled.data.removeprefix("folder:"))
    assert main(["device", "reset", "--dir", str(home), "--yes"]) == 0
    assert main(["device", "reset", "--dir", str(home), "--yes", "--delete-labels"]) == 4
    assert "start the agent once, or delete them yourself" in capsys.readouterr().err
    settings = home.parent / "config.toml"
    settings.write_text(f'id = "pi"\ndata = "{labelled.data}"\n')
    monkeypatch.setenv("EDGE_FL_CONFIG", str(settings))
    assert main(["device", "reset", "--dir", str(home), "--yes", "--delete-labels"]) == 0
    assert not files(data) and not files(home)


@pytest.mark.parametrize("secret", ["", "correct horse"])
def test_a_backup_restores_heads_ledgers_and_identity_on_a_new_card(
    device: Path, tmp_path: Path, secret: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, new = tmp_path / "pi-01.backup", tmp_path / "new"
    (tmp_path / "secret").write_text(f"{secret}\n")
    option = ["--passphrase-file", str(tmp_path / "secret")] if secret else []
    assert main(["device", "backup", str(file), "--dir", str(device), *option]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    if secret:
        assert b"client.key" not in file.read_bytes()
        assert main(["device", "restore", str(file), "--dir", str(new)]) == 4
        assert "encrypted; expected --passphrase-file" in capsys.readouterr().err
        (tmp_path / "other").write_text("wrong horse")
        assert (
            main(
                [
                    "device",
                    "restore",
                    str(file),
                    "--dir",
                    str(new),
                    "--passphrase-file",
                    str(tmp_path / "other"),
                ]
            )
            == 4
        )
        assert "wrong passphrase" in capsys.readouterr().err
    identity = tmp_path / "new-identity"
    assert (
        main(["device", "restore", str(file), "--dir", str(new), "--identity", str(identity), *option]) == 0
    )
    assert files(new) == {
        *("heads/file.json", "immediate/file.json", "own/file.json", "statistics/file.json", "tuf/file.json"),
        *("memory.json", "answers.json", "settings.json", "privacy.safetensors"),
    }
    assert {path.name: path.stat().st_mode & 0o777 for path in identity.iterdir()} == dict.fromkeys(
        ("ca.crt", "client.crt", "client.key"), 0o600
    )
    assert main(["device", "backup", str(file), "--dir", str(device), *option]) == 4  # never overwritten


def test_a_restore_never_lowers_the_epsilon_spent_or_the_record_of_sums_and_asks_before_it_replaces(
    device: Path, tmp_path: Path
) -> None:
    file = tmp_path / "b"
    assert main(["device", "backup", str(file), "--dir", str(device)]) == 0
    (device / "privacy.safetensors").write_text("more")
    (device / "statistics" / "sent.json").write_text("more")
    (device / "heads/file.json").write_text("newer")
    assert main(["device", "restore", str(file), "--dir", str(device)]) == 4
    assert main(["device", "restore", str(file), "--dir", str(device), "--yes"]) == 0
    assert (device / "statistics" / "sent.json").read_text() == "more"
    assert (device / "privacy.safetensors").read_text() == "more" and (
        device / "heads/file.json"
    ).read_text() == "heads"


def test_links_in_a_devices_folder_are_backed_up_as_the_files_that_they_name(
    device: Path, tmp_path: Path
) -> None:
    history = device / "tuf/metadata/root_history"
    history.mkdir(parents=True)
    (history / "1.root.json").write_text("the first root")
    (history.parent / "root.json").symlink_to("root_history/1.root.json")  # as python-tuf does
    os.link(history / "1.root.json", device / "heads/linked.json")
    file, new = tmp_path / "pi.backup", tmp_path / "new"
    assert main(["device", "backup", str(file), "--dir", str(device)]) == 0
    assert main(["device", "restore", str(file), "--dir", str(new), "--yes"]) == 0
    copies = ["tuf/metadata/root.json", "tuf/metadata/root_history/1.root.json", "heads/linked.json"]
    assert [(new / name).read_text() for name in copies] == ["the first root"] * 3


def archive(name: str, kind: bytes = tarfile.REGTYPE) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, "/etc/passwd"
        tar.addfile(member)
    payload = made.getvalue()
    header = backups.BackupHeader(1, "pi-01", sha256=backups.hashlib.sha256(payload).hexdigest())
    return msgspec.json.encode(header) + b"\n" + payload


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no backup",
        b'{"edge_fl_backup":2,"device":"pi-01"}\n',
        b'{"edge_fl_backup":1,"device":"pi-01","sha256":"00"}\nx',
        archive("../evil"),
        archive("heads/../../evil"),
        archive("/etc/evil"),
        archive("other"),
        archive("heads/link", tarfile.SYMTYPE),
        archive("identity/evil"),
        archive("heads/a")[:-20],
    ],
)
def test_anything_but_a_complete_backup_is_rejected(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "b"
    file.write_bytes(content)
    with pytest.raises(InputError, match=str(file)):
        backups.read(file)
    assert main(["device", "restore", str(file), "--dir", str(tmp_path / "new"), "--yes"]) == 4
    assert not (tmp_path / "new").exists()


def test_an_uninstalled_board_keeps_the_pictures_and_nothing_else(tmp_path: Path) -> None:
    unit = tmp_path / "etc/systemd/system/edge-fl.service"
    wanted = tmp_path / "etc/systemd/system/multi-user.target.wants/edge-fl.service"
    for path in (unit, tmp_path / "opt/edge-fl/venv-1/bin/edge-fl", tmp_path / "var/lib/edge-fl/heads/a"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    wanted.parent.mkdir(parents=True)
    wanted.symlink_to(unit)
    (tmp_path / "usr/local/bin").mkdir(parents=True)
    (tmp_path / "usr/local/bin/edge-fl").write_text("x")
    other = tmp_path / "etc/systemd/system/ssh.service"
    other.write_text("x")
    pictures = tmp_path / "home/pi/pictures/cat/1.png"
    pictures.parent.mkdir(parents=True)
    pictures.write_text("x")
    config = tmp_path / "etc/edge-fl/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'data = "folder:{tmp_path}/var/lib/edge-fl/heads"\n')
    with pytest.raises(InputError, match="move them first"):
        installed(tmp_path)
    config.write_text(f'data = "folder:{pictures.parents[1]}"\n')
    uninstall(installed(tmp_path), tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()}
    assert left == {"etc/systemd/system/ssh.service", "home/pi/pictures/cat/1.png"}
    assert installed(tmp_path) == []


@pytest.mark.skipif(os.path.lexists("/opt/edge-fl"), reason="edge-fl is installed on this machine")
def test_a_machine_without_an_installation_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device", "uninstall", "--yes"]) == 4
    assert "nothing of 'edge-fl flash' is installed here" in capsys.readouterr().err


def test_what_onnxruntime_wrote_for_the_accounts_of_a_board_is_known(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/bash\nedge-fl:x:999:999::/var/lib/edge-fl:/usr/sbin/nologin\n"
        "pi:x:1000:1000:,,,:/home/pi:/bin/bash\nbroken\n"
    )
    assert left_by_dependencies(tmp_path) == []
    written = ["home/pi/.cache/Microsoft/DeveloperTools/.onnxruntime/deviceid", "tmp/.ses"]
    for name in (*written, "home/pi/.cache/other/file", "home/ann/.cache/Microsoft/DeveloperTools/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert left_by_dependencies(tmp_path) == [(tmp_path / written[0]).parent, tmp_path / written[1]]
