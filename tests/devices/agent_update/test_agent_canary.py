"""The canary of an agent tells an accident of a child from a new environment that does not work."""

from pathlib import Path

import pytest

from edge_fl.errors import ArtefactError, ChildError, RunError
from edge_fl_devices.agent_update import canary

ANSWER = '{"failed":{},"classes":["a"]}'


def environment(folder: Path, *runs: str) -> Path:
    """An environment whose Python does what `runs` say, one after the other; the last one from then on."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    for number, run in enumerate(runs):
        (folder / f"run-{number}").write_text(run)
    (folder / "count").write_text("0")
    python.write_text(
        f"#!/bin/sh\ncd {folder}\nnumber=$(cat count)\n[ -e run-$((number + 1)) ] && echo $((number + 1)) > count\n. ./run-$number\n"
    )
    python.chmod(0o755)
    return folder


WORKS = f"echo '{ANSWER}'"


def test_a_canary_that_a_signal_ends_twice_is_run_again(tmp_path: Path) -> None:
    new = environment(tmp_path / "new", "kill -SEGV $$", "kill -BUS $$", WORKS)
    running = environment(tmp_path / "running", "kill -SEGV $$", WORKS)
    canary.require(new, running, tmp_path)


def test_an_environment_that_a_signal_ends_every_time_fails(tmp_path: Path) -> None:
    new, running = environment(tmp_path / "new", "kill -ILL $$"), environment(tmp_path / "running", WORKS)
    with pytest.raises(ArtefactError, match=r"ended by SIGILL .*the running agent stays") as caught:
        canary.require(new, running, tmp_path)
    assert caught.value.why == "canary_failed"


def test_an_environment_that_the_system_killed_is_tested_again_later(tmp_path: Path) -> None:
    new, running = environment(tmp_path / "new", "kill -KILL $$"), environment(tmp_path / "running", WORKS)
    with pytest.raises(ChildError, match="out of memory"):
        canary.require(new, running, tmp_path)


def test_an_environment_that_does_not_import_fails_at_once(tmp_path: Path) -> None:
    new = environment(tmp_path / "new", "echo no module >&2; exit 1", WORKS)
    with pytest.raises(ArtefactError, match="exit code 1, no module"):
        canary.require(new, environment(tmp_path / "running", WORKS), tmp_path)


def test_a_running_environment_without_an_answer_is_no_verdict_about_the_new_one(tmp_path: Path) -> None:
    running = environment(tmp_path / "running", "exit 3")
    with pytest.raises(RunError, match="exit code 3"):
        canary.require(environment(tmp_path / "new", WORKS), running, tmp_path)
