"""Every command: help with example, metavars and panel; outputs that are closed or full, and Ctrl-C at any moment, give no traceback."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from edge_fl import cli
from edge_fl.console.help import PANELS
from tests.leftovers import processor_s

SEVERAL = {
    "--format": "one meaning, and not every result is a table: report writes a page, predictions are also CSV",
    "--dir": "the own folder of what runs: a device, the broker, or all devices of a simulated fleet",
    "--port": "where a client finds the broker, or where the command itself listens: never both on one command",
}
"""Options whose metavar or meaning differs between commands, and why one name is right."""
SYNONYMS = (
    {"--dir", "--directory", "--folder", "--path"},
    {"--out", "--output", "--to", "--dest", "--into"},
    {"--runs", "--results"},
    {"--identities", "--ca-dir", "--pki"},
    {"--wait", "--timeout", "--deadline", "--max-wait"},
    {"--yes", "--anyway", "--force", "--assume-yes"},
    {"--where", "--select", "--selector", "--filter", "--only"},
    {"--since", "--from", "--after", "--resolved", "--newer"},
    {"--until", "--before", "--older"},
    {"--limit", "--last", "--max", "--number"},
    {"--id", "--device", "--name", "--device-id"},
    {"--host", "--broker", "--server", "--address"},
    {"--listen", "--bind"},
    {"--format", "--json", "--csv", "--output-format"},
    {"--seeds", "--seed", "--random-state"},
    {"--quiet", "--silent"},
    {"--set", "--option", "--param"},
    {"--log-format", "--log"},
)
"""Names for one thing: at most one of each set is an option."""

EDGE_FL = [sys.executable, "-m", "edge_fl"]
ROOT: Any = get_command(cli.load(metadata.entry_points(group=cli.ENTRY_POINTS)).root)
LISTING = ["runs", "list", "--runs", "nowhere"]  # a line on stdout and one on stderr
SHELLS_130 = (130, -signal.SIGINT)
FULL = "edge-fl: standard output: No space left on device; the output is not complete\n"


def tree(command: Any = ROOT, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from tree(inner, (*path, name))


EVERY = [pytest.param(path, command, id=" ".join(path) or "edge-fl") for path, command in tree()]
COMMANDS = [
    pytest.param(path, command, id=" ".join(path))
    for path, command in tree()
    if not hasattr(command, "commands")
]


@pytest.mark.parametrize(("path", "command"), EVERY)
@pytest.mark.parametrize("columns", ["80", "200"])
def test_every_help_fits_the_terminal(
    path: tuple[str, ...],
    command: Any,
    columns: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main([*path, "-h"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= (80 if columns == "80" else 120)
    assert len(command.help.split()) > 1
    assert not any(line.rstrip().endswith("...") for line in lines[1:] if "PREFIX000" not in line)


@pytest.mark.parametrize(("path", "command"), COMMANDS)
def test_every_command_has_an_example_that_it_accepts(path: tuple[str, ...], command: Any) -> None:
    for line in command.epilog.splitlines():
        words = shlex.split(line)
        assert words[: len(path) + 1] == ["edge-fl", *path]
        context = command.make_context("example", words[len(path) + 1 :], resilient_parsing=True)
        assert not context.args, f"{line}: not expected: {context.args}"
        given = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert given <= {
            name for parameter in command.params for name in parameter.opts + parameter.secondary_opts
        }


@pytest.mark.parametrize(("path", "command"), COMMANDS)
def test_every_value_has_a_metavar_and_a_meaning(path: tuple[str, ...], command: Any) -> None:
    for parameter in command.params:
        assert parameter.help, parameter.name
        if not getattr(parameter, "is_flag", False):
            assert re.fullmatch(r"[A-Z][A-Z@:=]*|[a-z|]+", parameter.metavar or ""), parameter.name


def test_commands_are_listed_by_panel_with_demo_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(command.rich_help_panel in PANELS for command in ROOT.commands.values())
    assert cli.main(["-h"]) == 0
    out = capsys.readouterr().out
    headings = re.findall(r"^(\w+):$", out, re.MULTILINE)
    assert headings == [*PANELS, "Options"]
    first = re.findall(r"^  (\w+) ", out.partition("Start:")[2], re.MULTILINE)[0]
    assert first == "demo"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(shell: str) -> None:
    line = "edge-fl fleet l"
    variables = {
        "_EDGE_FL_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": "2",
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(EDGE_FL, capture_output=True, text=True, env=os.environ | variables, timeout=60)
    assert "list" in done.stdout and "admit" not in done.stdout
    named = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # otherwise it is the parent's
    shown = subprocess.run(
        [*EDGE_FL, "--show-completion", shell], capture_output=True, text=True, env=named, timeout=60
    )
    assert shown.returncode == 0 and "_EDGE_FL_COMPLETE" in shown.stdout


@pytest.mark.parametrize("arguments", [LISTING, [*LISTING, "--format", "json"], ["-h"], ["--version"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_below_stdout_is_one_line(arguments: list[str], unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*EDGE_FL, "--quiet", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, FULL)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_enough_is_no_error(unbuffered: str) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as closed:
        done = subprocess.run(
            [*EDGE_FL, "--quiet", *LISTING], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "2>/dev/full"])
def test_closed_descriptors_are_no_error(closed: str) -> None:
    command = shlex.join([*EDGE_FL, *LISTING])
    done = subprocess.run(["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert bool(done.stdout) == (">&-" not in closed.replace("2>&-", ""))


@pytest.mark.parametrize("after_s", [0.06, 0.1, 0.2, 0.5, 0.9])
def test_ctrl_c_in_the_first_second_gives_one_line(after_s: float, tmp_path: Path) -> None:
    """A second of processor time: how far a start has come by then does not depend on the machine's other work."""
    command = [*EDGE_FL, "simulate", "--rounds", "100000", "--runs", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            while processor_s(child.pid) < after_s:
                time.sleep(0.001)
            child.send_signal(signal.SIGINT)
            _, error = child.communicate(timeout=60)
        finally:
            child.kill()
    if error.endswith("edge-fl: stopped by Ctrl-C\n"):
        assert child.returncode in SHELLS_130 and "Traceback" not in error
    else:  # Python itself was starting, or ending
        assert child.returncode in (1, *SHELLS_130) and "edge_fl" not in error


def meaning(help: str) -> str:
    """What an option is: its help up to the first comma, colon, bracket or full stop; the rest says what a command does with it."""
    return re.split(r" ?[;:,.(\[]", help)[0]


def options() -> Iterator[tuple[str, Any]]:
    """Each option of each command, with the command's name."""
    for path, command in tree(get_command(cli.load(metadata.entry_points(group=cli.ENTRY_POINTS)).root)):
        for parameter in command.params:
            if parameter.param_type_name == "option":
                yield " ".join(path), parameter


def test_an_option_is_the_same_on_every_command() -> None:
    kinds: dict[str, dict[object, list[str]]] = defaultdict(lambda: defaultdict(list))
    for command, parameter in options():
        for name in parameter.opts:
            kinds[name][parameter.metavar, meaning(parameter.help)].append(command)
    several = {name: dict(found) for name, found in kinds.items() if len(found) > 1}
    assert several.keys() == SEVERAL.keys(), several


def test_a_meaning_has_one_name() -> None:
    names: dict[str, set[str]] = defaultdict(set)
    for _, parameter in options():
        names[meaning(parameter.help)].add("/".join(parameter.opts))
    assert not {meaning: found for meaning, found in names.items() if len(found) > 1}
    used = {name for _, parameter in options() for name in parameter.opts}
    assert all(len(used & synonyms) <= 1 for synonyms in SYNONYMS)
    assert {name for name in used if not name.startswith("--")} == set(), (
        "short names, which few options have"
    )
