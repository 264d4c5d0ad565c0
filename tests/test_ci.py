"""The two descriptions of CI run the same make targets, and the workflow of a public forge downloads from nowhere that it names."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
RUN = (ROOT / ".ci/run").read_text()
WORKFLOW = (ROOT / ".github/workflows/ci.yml").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))


def called(script: str) -> dict[str, str]:
    """Make targets that a script runs, with their ARGS, of which `make check` takes none."""
    calls = re.findall(r"^make (?:-\w+ )*([a-z -]+?)(?: ARGS=(?:\"([^\"]*)\"|(\S+)))?$", script, re.MULTILINE)
    runs = [(target, quoted or bare) for targets, quoted, bare in calls for target in targets.split()]
    return {target: "" if target == "check" else given for target, given in runs}


def job() -> dict[str, Any]:
    jobs: dict[str, Any] = yaml.safe_load(WORKFLOW)["jobs"]
    (only,) = jobs.values()
    return dict(only)


def test_both_run_the_same_targets_in_the_same_way() -> None:
    ours = called(RUN)
    del ours["venv"]  # every target needs it
    theirs = {row["target"]: row.get("args", "") for row in job()["strategy"]["matrix"]["include"]}
    assert theirs == ours
    assert set(ours) <= TARGETS


def test_the_tests_that_are_left_out_of_one_target_are_those_of_the_core_which_another_one_runs() -> None:
    (core,) = re.findall(r"^CORE +:= (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "core" in called(RUN)
    assert re.findall(r"--ignore=(\S+)", RUN.replace('"', " ")) == core.split()


def test_both_install_the_same_packages() -> None:
    commands = [step.get("run", "") for step in job()["steps"]]
    assert ".ci/packages" in commands and re.search(r"^\.ci/packages$", RUN, re.MULTILINE)
    assert (ROOT / ".ci/packages").stat().st_mode & 0o100


def test_every_test_is_in_one_of_the_targets_or_named_as_left_out() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (fast,) = re.findall(r"^test:.*\n.* -m '(.*?)'", makefile, re.MULTILINE)
    (slow,) = re.findall(r"^slow:.*\n.* -m '(.*?)'", makefile, re.MULTILINE)
    (timed,) = re.findall(r"^timed:.*\n.* -m (\w+) ", makefile, re.MULTILINE)
    marks = ("slow", "timed", "ray", "gpu", "arm64", "browser")
    for mark in marks:
        has = dict.fromkeys(marks, False) | {mark: True}
        chosen = [bool(eval(expression, {"__builtins__": {}}, has)) for expression in (fast, slow, timed)]
        assert chosen == [False, mark in ("slow", "arm64", "browser"), mark == "timed"], mark


def test_the_workflow_names_no_host() -> None:
    assert "://" not in WORKFLOW
    assert not re.search(r"\b[\w-]+\.(?:com|org|io|net)\b", WORKFLOW)
