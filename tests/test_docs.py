"""Every command in the docs: a block that opens with ``console`` is run, and all that name `edge-fl` fit the command line as it is.

The convention, for README.md and docs/*.md:

    ```console            its lines that begin with "$ " are run in order in a scratch folder, one folder per page, each must succeed;
    $ edge-fl ...         what the page shows as a ```python block whose first line is "# NAME.py" lies in that folder before
    ```
    <!-- not run: why --> above a block with commands that are not run: they need hardware, hours, or several terminals
    ```
    edge-fl ...           whether run or not, its command and its options must exist
    ```
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from edge_fl import cli

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
STRICT = (
    "docs/README.md",
    "quick-start.md",
    "your-own.md",
    "troubleshooting.md",
    "reproducing-the-papers.md",
)
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<why>[^>]+) -->\n)?^```(?P<kind>[a-z]*)\n(?P<text>.*?)^```$", re.M | re.S
)
INLINE = re.compile(r"`(edge-fl [^`]+)`")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    kind: str
    text: str
    why: str

    @property
    def commands(self) -> list[str]:
        """Its lines that are commands, each on one line and without what follows a #."""
        lines = self.text.replace("\\\n", " ").splitlines()
        found = [line.removeprefix("$ ").strip() for line in lines]
        return [line for line in found if re.match(r"(edge-fl|python|make) ", line)]


def blocks(page: Path) -> list[Block]:
    return [Block(m["kind"], m["text"], m["why"] or "") for m in BLOCK.finditer(page.read_text())]


def words(command: str) -> list[str]:
    """The arguments of an `edge-fl` command; a group's alternatives ("list | show") give the first."""
    return shlex.split(command.partition(" && ")[0].partition(" & ")[0], comments=True)[1:]


def commands() -> Iterator[Any]:
    for page in PAGES:
        for block in blocks(page):
            for command in block.commands:
                if command.startswith("edge-fl "):
                    yield pytest.param(command, id=f"{page.name}: {command[:60]}")


@pytest.fixture(scope="module")
def app() -> Any:
    loaded = cli.load(metadata.entry_points(group=cli.ENTRY_POINTS))
    from typer.main import get_command

    return get_command(loaded.root)


@pytest.mark.parametrize("command", [*commands()])
def test_every_command_in_the_docs_is_one_that_there_is(app: Any, command: str) -> None:
    found, rest = app, words(command)
    while rest and hasattr(found, "commands") and not rest[0].startswith("-"):
        assert rest[0] in found.commands, f"{command}: there is no {rest[0]!r}"
        found, rest = found.commands[rest[0]], rest[1:]
    known = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help"
    }
    asked = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
    assert asked <= known, f"{command}: there is no {', '.join(sorted(asked - known))}"


@pytest.mark.parametrize("name", STRICT)
def test_commands_that_are_not_run_say_why(name: str) -> None:
    page = ROOT / (name if "/" in name else f"docs/{name}")
    silent = [
        block.text for block in blocks(page) if block.commands and block.kind != "console" and not block.why
    ]
    assert not silent


def test_links_between_pages_lead_somewhere() -> None:
    known = {page.name for page in PAGES} | {
        "releases.md",
        "devices.md",
        "running-a-fleet.md",
    }  # each on its way
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text()):
            assert Path(target).name in known, f"{page.name}: {target}"


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(b.kind == "console" for b in blocks(page))],
    ids=lambda page: page.name,
)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    variables = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        "OMP_NUM_THREADS": "1",
    }
    for block in blocks(page):
        if block.kind == "python" and (named := re.match(r"# (\w+\.py)\n", block.text)):
            (tmp_path / named[1]).write_text(block.text)
        if block.kind == "console":
            for command in block.commands:
                done = subprocess.run(
                    shlex.split(command, comments=True),
                    cwd=tmp_path,
                    env=variables,
                    capture_output=True,
                    text=True,
                )
                assert done.returncode == 0, f"$ {command}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
