"""Invalid input gives one line with the value and what was expected, exit code 4, and starts nothing."""

from pathlib import Path

import pytest

from edge_fl.cli import main

# command line -> part of the error message
WRONG = {
    "simulate --scale 0": "--scale",
    "simulate --model os:path": "model 'os:path': module, expected a function or a class",
    "simulate --recipe nosuch": "more); expected a name of 'edge-fl recipes list'",
    "server run": "expected a recipe, such as demo, or --resume RUN",
    "server run demo --host a/b": "[broker] host = 'a/b': expected",
    "server run demo --fleet A": "--fleet A: expected 1 to 32 of a-z",
    "fleet list --fleet a/b": "--fleet a/b: expected 1 to 32 of a-z",
    "fleet admit pi-1 --database sqlite://": "no device 'pi-1'; nothing was changed",
    "fleet up --set data.partition=nosuch": "partition = 'nosuch': unknown name (known: dirichlet,",
    "fleet up --head-only 1.5": "--head-only 1.5: a fraction needs --devices",
    "fleet up --devices 3 --full 9": "--devices 3 --full 9: -6 head-only and 9 full",
    "fleet enrol": "no names, no --count and no --total",
    "broker up --ca a --cert b --key c": "a, b, c: no such file",
    "broker up --insecure --fleet A": "--fleet A: expected",
    "device run --data there": "options: id: missing, expected a value",
    "device run --id pi-1 --data there --head nosuch": "svm); 'auto' chooses among them",
    "device run --id pi-1 --data there --dir file --port 1": "file: File exists; expected a writable folder",
    "report elsewhere/none": "edge-fl: elsewhere/none: not a run's folder",
    "compare --out file --methods local": "file: not a folder; expected one for the cells",
    "server dashboard --port 0 --cert file --key file": "expected a certificate and its key (PEM)",
}


@pytest.mark.parametrize("typed", WRONG)
def test_it_is_one_line(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("of something else")
    assert main(typed.split()) == 4
    said = capsys.readouterr()
    line = said.err.splitlines()[-1]
    assert line.startswith("edge-fl: ") and WRONG[typed] in line
    assert len(line) < 800
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/state.json"))


def test_runs_list_reports_a_folder_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list", "--runs", str(tmp_path / "mistyped")]) == 0
    assert f"{tmp_path / 'mistyped'}: no runs" in capsys.readouterr().err
