"""Every command in the docs is run, or says why not; whatever is run or not, it fits the command line as it is.

The convention, for README.md and docs/*.md; the comments stand directly above a block:

    ```console            its lines that begin with "$ " are run in order in a scratch folder, one folder per page, each must succeed;
    $ edge-fl ...         what the page shows as a block whose first line is "# NAME.py" or "# NAME.toml" lies in that folder before,
    ```                   and photo.png does, a picture
    <!-- read after README.md -->   anywhere: the page goes on in the other's folder, with what serves there
    <!-- run side by side -->       all its commands at once, as in terminals of their own; the last one has to end, who serves is stopped
    <!-- run with --set rounds=1 -->    each command with these options too, where it knows them: the same, but shorter
    <!-- run where /media/usb is usb -->    with another word in place of a name that is not the same everywhere
    <!-- not run: why -->           above a block whose commands need hardware, hours or somebody else's broker

A block that is no `console` and says nothing has only commands that some page runs. Commands run in a network of their own where this
process may make one (root on Linux): the ports are free, and nothing outside can be reached.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from edge_fl import cli

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"(?P<notes>(?:<!-- [^>]+ -->\n)*)^```(?P<kind>[a-z]*)\n(?P<text>.*?)^```$", re.M | re.S)
NOTE = re.compile(r"<!-- (.+?) -->")
AFTER = re.compile(r"<!-- read after (\S+) -->")
INLINE = re.compile(r"`(edge-fl [a-z][^`]+)`")
DEADLINE_S = 240.0
SETTLE_S = 2.0
NOT_RUN_AT_MOST = 36
"""Commands that are excused, on all pages together; a new one has to be worth it."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page, and the notes above it."""

    kind: str
    text: str
    notes: tuple[str, ...] = ()

    @property
    def is_run(self) -> bool:
        return self.kind == "console"

    @property
    def why(self) -> str:
        """Why it is not run; empty when it does not say."""
        return next((note.partition(": ")[2] for note in self.notes if note.startswith("not run: ")), "")

    @property
    def commands(self) -> list[str]:
        """Its lines that are commands, each on one line and without what follows a #."""
        lines = self.text.replace("\\\n", " ").splitlines()
        found = [line.removeprefix("$ ").strip() for line in lines]
        return [
            re.split(r"\s#\s|\s&(?:\s|$)", line)[0].strip()
            for line in found
            if re.match(r"(edge-fl|python|make|pip|ssh) ", line)
        ]


def blocks(page: Path) -> list[Block]:
    return [
        Block(m["kind"], m["text"], tuple(NOTE.findall(m["notes"]))) for m in BLOCK.finditer(page.read_text())
    ]


def after(page: Path) -> str:
    """The page that this one goes on from; empty for one that begins by itself."""
    found = AFTER.search(page.read_text())
    return found[1] if found else ""


RUN = {command for page in PAGES for block in blocks(page) if block.is_run for command in block.commands}


def words(command: str) -> list[str]:
    """The arguments of an `edge-fl` command; a group's alternatives ("list | show") give the first."""
    return shlex.split(command.partition(" && ")[0].partition(" & ")[0], comments=True)[1:]


def commands() -> Iterator[Any]:
    for page in PAGES:
        shown = [command for block in blocks(page) for command in block.commands]
        for command in [*shown, *INLINE.findall(page.read_text())]:
            if command.startswith("edge-fl "):
                yield pytest.param(command, id=f"{page.name}: {command[:60]}")


@pytest.fixture(scope="module")
def app() -> Any:
    loaded = cli.load(metadata.entry_points(group=cli.ENTRY_POINTS))
    from typer.main import get_command

    return get_command(loaded.root)


@pytest.mark.parametrize("command", [*commands()])
def test_every_command_in_the_docs_is_one_that_there_is(app: Any, command: str) -> None:
    found, rest = _found(app, words(command))
    asked = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
    assert asked <= (known := _options(found)), f"{command}: there is no {', '.join(sorted(asked - known))}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_not_run_say_why(page: Path) -> None:
    silent = [
        command
        for block in blocks(page)
        if not block.is_run and not block.why
        for command in block.commands
        if command not in RUN
    ]
    assert not silent


def test_few_commands_are_not_run() -> None:
    excused = {c for page in PAGES for b in blocks(page) if not b.is_run for c in b.commands} - RUN
    assert len(excused) <= NOT_RUN_AT_MOST < len(excused) + 5, sorted(excused)


def test_links_between_pages_lead_somewhere() -> None:
    known = {page.name for page in PAGES}
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", page.read_text()):
            assert Path(target).name in known, f"{page.name}: {target}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("mosquitto_program")
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if not after(page) and any(b.is_run for b in blocks(page))],
    ids=lambda page: page.name,
)
def test_the_commands_of_a_page_run(app: Any, page: Path, tmp_path: Path) -> None:
    Image.linear_gradient("L").save(tmp_path / "photo.png")
    with apart() as prefix, Session(app, tmp_path, prefix) as session:
        for chapter in [page, *(other for other in PAGES if after(other) == page.name)]:
            for block in blocks(chapter):
                if named := re.match(r"# (\w+\.(?:py|toml))\n", block.text):
                    (tmp_path / named[1]).write_text(block.text)
            for block in blocks(chapter):
                if block.is_run:
                    session.run(block)


@dataclass
class Session:
    """A person who follows one page in one folder. What serves is stopped at the end, or when others take its place."""

    app: Any
    folder: Path
    prefix: list[str]

    def __enter__(self) -> Session:
        self._serving: list[tuple[str, subprocess.Popen[str], Path]] = []
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        above = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self._variables = {**os.environ, "PATH": path, "PYTHONPATH": above, "OMP_NUM_THREADS": "1"}
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, block: Block) -> None:
        """Raises AssertionError with what a command printed when it does not succeed."""
        wanted = [self._as_run(command, block) for command in block.commands]
        if at_once := "run side by side" in block.notes:
            self._stop()
        for number, command in enumerate(wanted):
            self._start(command)
            if not at_once or number == len(wanted) - 1:
                self._wait()
            else:
                time.sleep(SETTLE_S)  # no order is needed, but a broker that is there is found at once
        for command, process, said in self._serving[:-1]:
            assert process.poll() in (None, 0), f"$ {command}\n{said.read_text()[-2000:]}"

    def _as_run(self, command: str, block: Block) -> str:
        for note in block.notes:
            if here := re.fullmatch(r"run where (\S+) is (\S+)", note):
                command = command.replace(here[1], here[2])
            if note.startswith("run with ") and command.startswith("edge-fl "):
                found, _ = _found(self.app, words(command))
                options = re.findall(r"--\S+(?: [^-]\S*)?", note)
                command = " ".join([command, *(o for o in options if o.split()[0] in _options(found))])
        return command

    def _start(self, command: str) -> None:
        said = self.folder / f".said-{len(self._serving)}"
        with said.open("w") as file:
            process = subprocess.Popen(
                [*self.prefix, *shlex.split(command)],
                cwd=self.folder,
                env=self._variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._serving.append((command, process, said))

    def _wait(self) -> None:
        command, process, said = self._serving[-1]
        assert process.wait(DEADLINE_S) == 0, f"$ {command}\n{said.read_text()[-2000:]}"

    def _stop(self) -> None:
        for _, process, _ in self._serving:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for _, process, _ in self._serving:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._serving.clear()


@contextmanager
def apart() -> Iterator[list[str]]:
    """What to put before a command so that it runs in a network of its own, with nothing but a loopback."""
    if os.geteuid() != 0:
        yield []
        return
    up = "ip link set lo up && echo up && exec sleep infinity"
    holder = subprocess.Popen(["unshare", "--net", "sh", "-c", up], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout and holder.stdout.readline() == "up\n"
        yield ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def _found(app: Any, words: list[str]) -> tuple[Any, list[str]]:
    """The command that these words name, and its arguments."""
    found, rest = app, words
    while rest and hasattr(found, "commands") and not rest[0].startswith("-"):
        assert rest[0] in found.commands, f"{' '.join(words)}: there is no {rest[0]!r}"
        found, rest = found.commands[rest[0]], rest[1:]
    return found, rest


def _options(command: Any) -> set[str]:
    names = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return names | {"--help"}
