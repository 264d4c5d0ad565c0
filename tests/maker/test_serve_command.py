"""`edge-fl device serve` and `device watch` as commands: which folder they serve."""

import subprocess
import sys
from pathlib import Path

import pytest

from edge_fl.cli import main

ENDS = "label pictures\n"


def announced(here: Path, *options: str) -> str:
    """What the command says until it serves the label page."""
    command = [sys.executable, "-m", "edge_fl", "device", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, cwd=here, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    lines = list[str]()
    try:
        for line in process.stderr:
            lines.append(line)
            if line.endswith(ENDS):
                break
    finally:
        process.terminate()
        process.wait(20)
        process.stderr.close()
    return "".join(lines)


@pytest.mark.parametrize(
    ("options", "folder"),
    [([], "state"), (["--dir", "other"], "other")],
    ids=["of the settings", "of the option"],
)
def test_the_folder_is_that_of_the_settings_unless_an_option_names_one(
    tmp_path: Path, options: list[str], folder: str
) -> None:
    for name in ("state", "other", "pictures"):
        (tmp_path / name).mkdir()
    (tmp_path / "device.toml").write_text('id = "pi-1"\ndata = "folder:pictures"\nfolder = "state"\n')
    said = announced(tmp_path, "--config", "device.toml", *options)
    assert f"/predict serves {folder};" in said
    assert (tmp_path / folder / "unlabelled").is_dir()
    assert not (tmp_path / "device").exists()


@pytest.mark.parametrize(
    ("options", "folder"),
    [([], "state"), (["--dir", "other"], "other")],
    ids=["of the settings", "of the option"],
)
def test_a_camera_is_watched_with_the_model_of_the_folder_of_the_settings(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    folder: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("state", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "device.toml").write_text('id = "pi-1"\ndata = "folder:pictures"\nfolder = "state"\n')
    assert main(["device", "watch", "--publish", "--config", "device.toml", *options]) == 4
    assert f"{folder}: no personal model" in capsys.readouterr().err
