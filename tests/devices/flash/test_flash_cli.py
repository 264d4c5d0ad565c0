"""The command `edge-fl flash`."""

import json
import os
import tomllib
from pathlib import Path

import pytest

from edge_fl.cli import main
from tests.devices.flash import cards

HOST = ["--host", "192.168.1.10"]


@pytest.fixture
def card(tmp_path: Path) -> Path:
    return cards.folder(tmp_path / "bootfs", cards.BOOKWORM)


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_dry_run_lists_what_would_be_written_and_writes_nothing(
    card: Path, identity: Path, wheels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(card)
    arguments = ["flash", "--id", "pi-07", "--boot", str(card), *HOST, "--identity", str(identity)]
    arguments += ["--wheels", str(wheels)]
    assert main([*arguments, "--dry-run", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert files(card) == before
    assert main(arguments) == 0
    assert {row["path"] for row in rows} - before == files(card) - before
    assert {"edge-fl/identity/client.key": "0600"}.items() <= {r["path"]: r["mode"] for r in rows}.items()
    output = capsys.readouterr()
    assert "PRIVATE" not in output.out + output.err and "put the card into the Pi" in output.err
    assert "what leaves pi-07 for others: class statistics, in masked sums over at least 5" in output.err
    assert main(arguments) == 0
    assert "pi-07 is installed already; nothing was written" in capsys.readouterr().err


def test_an_enrolled_devices_identity_and_pictures_are_taken_along(
    identity: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/identities/devices").mkdir(parents=True)
    identity.rename("runs/identities/devices/pi-07")
    (tmp_path / "mine/cat").mkdir(parents=True)
    (tmp_path / "mine/cat/1.png").write_bytes(b"a cat")
    arguments = [
        "flash",
        "--id",
        "pi-07",
        "--out",
        "out",
        *HOST,
        "--wheels",
        str(wheels),
        "--images",
        "mine",
    ]
    assert main([*arguments, "--dry-run"]) == 0 and not (tmp_path / "out").exists()
    assert main(arguments) == 0
    there = tmp_path / "out/edge-fl"
    assert (there / "images/cat/1.png").read_bytes() == b"a cat" and (there / "identity/client.key").exists()
    assert "\nimages=/srv/images\n" in (there / "install.sh").read_text()
    assert main([*arguments, "--data", "npz:/srv/a.npz"]) == 4


def test_the_newest_exported_release_is_taken_along_and_its_root_trusted(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (
        "metadata/1.root.json",
        "metadata/10.root.json",
        "targets/9/a.x.onnx",
        "targets/10/b.x.onnx",
    ):
        (tmp_path / "web" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "web" / path).write_text(path)
    arguments = ["flash", "--id", "pi-07", "--insecure", "--out", "out", *HOST, "--wheels", str(wheels)]
    assert main([*arguments, "--releases", "web"]) == 0
    there = tmp_path / "out/edge-fl"
    assert files(there / "releases") == {"targets/10/b.x.onnx"}
    assert (there / "root.json").read_text() == "metadata/10.root.json"
    settings = tomllib.loads((there / "config.toml").read_text())
    assert (settings["mirror"], settings["root"]) == (
        "file:///opt/edge-fl/releases",
        "/etc/edge-fl/root.json",
    )
    (tmp_path / "empty").mkdir()
    assert main([*arguments, "--releases", "empty"]) == 4
    assert "empty: no releases in it; expected a folder written by" in capsys.readouterr().err


def test_only_readable_pictures_in_class_folders_are_copied(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (
        "cat/1.png",
        "cat/2.HEIC",
        "cat/notes.txt",
        "cat/old/3.png",
        "lost.png",
        "cat/.DS_Store",
        ".old/1.png",
    ):
        (tmp_path / "mine" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / path).write_bytes(b"content")
    os.mkfifo("mine/cat/pipe.png")
    arguments = ["flash", "--id", "pi-07", "--insecure", "--out", "out", *HOST, "--wheels", str(wheels)]
    assert main([*arguments, "--images", "mine"]) == 0
    assert files(tmp_path / "out/edge-fl/images") == {"cat/1.png", "cat/2.HEIC"}
    said = capsys.readouterr().err
    assert (
        "mine: 4 files are not readable, not in a folder per class, or of another kind; they are left out"
        in said
    )
    assert "mine: 1 HEIC pictures, which the Pi could not read; pip install 'edge-fl[heic]'" in said
    (tmp_path / "empty").mkdir()
    for folder, why in (("empty", "no pictures or recordings in it"), ("nowhere", "no such folder")):
        assert main([*arguments, "--images", folder]) == 4
        assert f"{folder}: {why}; expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--id", "pi-07"], "expected one of --boot, --ssh and --out"),
        (["--id", "pi-07", "--out", "a", "--ssh", "b"], "expected one of --boot, --ssh and --out"),
        (["--id", "pi-07", "--boot", "nowhere", *HOST], "nowhere: does not exist"),
        (["--id", "pi-07", "--out", "o"], "--host is missing"),
        (["--id", "Pi_07", "--out", "o", *HOST], "id = 'Pi_07': expected"),
        (
            ["--id", "pi-07", "--out", "o", *HOST, "--python", "3.9"],
            "--python 3.9: expected 3.11 or 3.13",
        ),
        (["--id", "pi-07", "--ssh", "-oProxyCommand=x", *HOST], "expected user@host"),
        (
            ["--id", "pi-07", "--out", "o", *HOST, "--identity", "none"],
            "none: No such file or directory; expected an identity",
        ),
        (
            ["--id", "pi-07", "--out", "o", *HOST, "--data", "folder:/home/pi/x"],
            "no home or temporary folder",
        ),
        (["--id", "pi-07", "--out", "o", *HOST, "--root", "none"], "none: No such file"),
        (
            ["--id", "pi-08", "--out", "o", *HOST],
            "no identity; expected one made by 'edge-fl fleet enrol pi-08', or --insecure",
        ),
    ],
)
def test_bad_input_ends_with_one_line(
    arguments: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["flash", *arguments]) == 4
    output = capsys.readouterr().err
    assert why in output and output.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
