"""Commands, links, paths and module names in README.md, CONTRIBUTING.md and docs/*.md.

Comments directly above a code block control how its commands are tested:

    ```console            lines that begin with "$ " are run in order in a temporary folder, one per page; each must succeed.
    $ edge-fl ...         It contains photo.png, pictures/, and what `_write_samples` writes, a wheel of edge-fl 0.2.0, and every block
    ```                   of the page whose first line is "# NAME.py" or "# NAME.toml".
                          Lines below a command are its output: the headings of a table must be those that it prints.
    <!-- read after README.md -->   anywhere on the page: continue in the other page's folder, with its running services
    <!-- run side by side -->       run all commands of the block concurrently; the last one has to end, services are stopped afterwards
    <!-- run with --set rounds=1 -->    add these options to every command that has them, to shorten it
    <!-- run server run with --set rounds=1 -->    the same, to one of the commands
    <!-- run where /media/usb is usb -->    replace a name that depends on the machine
    <!-- not run: why -->           the reason why the commands of the next block are not run: hardware, hours, another broker

A block of another kind without a comment may only repeat commands that some page runs. As root on Linux, commands run in a network of their
own (`tests.network`): all ports are free, no other host can be reached, and a command that tries to reach one fails the test.
"""

import importlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_iris

import edge_fl
from edge_fl import cli
from edge_fl.modalities import audio
from tests import agents
from tests.links import broken_links
from tests.network import Network, recorded_network
from tests.warm import Command, WarmStart

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"(?P<notes>(?:<!-- [^>]+ -->\n)*)^```(?P<kind>[a-z]*)\n(?P<text>.*?)^```$", re.M | re.S)
NOTE = re.compile(r"<!-- (.+?) -->")
AFTER = re.compile(r"<!-- read after (\S+) -->")
INLINE = re.compile(r"`(edge-fl [a-z][^`]+)`")
OUR_PATH = re.compile(r"(?<![\w./-])((?:edge_fl|broker|devices|server|tests|tools|docs)/[\w./+-]*[\w/])")
OUR_MODULE = re.compile(
    r"(?<![\w./-])(?<!\[\")((?:edge_fl(?:_[a-z]+)?|tests|tools)(?:\.\w+)+)(?![\w/]*\()(?![\w/-])"
)
NO_MODULES = {"toml", "md", "py", "csv", "crt", "json", "local", "example"}  # suffixes of file and host names
DEADLINE_S = 240.0
SETTLE_S = 0.5
CACHE = ".cache"
NOT_RUN_AT_MOST = 36
"""Limit of commands that are not run, on all pages together."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the comments above it."""

    kind: str
    text: str
    notes: tuple[str, ...] = ()

    @property
    def is_run(self) -> bool:
        return self.kind == "console"

    @property
    def why(self) -> str:
        """The reason why it is not run; empty without one."""
        return next((note.partition(": ")[2] for note in self.notes if note.startswith("not run: ")), "")

    @property
    def commands(self) -> list[str]:
        """Its commands, each on one line and without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        found = [line.removeprefix("$ ").strip() for line in lines]
        return [
            re.split(r"\s#\s|\s&(?:\s|$)", line)[0].strip()
            for line in found
            if re.match(r"(edge-fl|python|make|pip|ssh|install) ", line)
        ]

    @property
    def headings(self) -> dict[str, list[str]]:
        """By command: the headings of the table that is shown below it."""
        found: dict[str, list[str]] = {}
        command = ""
        for line in self.text.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                command = re.split(r"\s#\s", line.removeprefix("$ "))[0].strip()
            elif command and len(cells := re.split(r"\s{2,}", line.strip())) > 1:
                found.setdefault(command, cells)
        return found


def blocks(page: Path) -> list[Block]:
    return [
        Block(m["kind"], m["text"], tuple(NOTE.findall(m["notes"]))) for m in BLOCK.finditer(page.read_text())
    ]


def after(page: Path) -> str:
    """The page that this one continues; empty for an independent page."""
    found = AFTER.search(page.read_text())
    return found[1] if found else ""


RUN = {command for page in PAGES for block in blocks(page) if block.is_run for command in block.commands}


def resolves(name: str) -> bool:
    """Whether a dotted name is a module of ours, an attribute of one, an entry-point group, or a file or host name."""
    parent, _, attribute = name.rpartition(".")
    if attribute in NO_MODULES or metadata.entry_points(group=name):
        return True
    with suppress(ModuleNotFoundError):
        if importlib.util.find_spec(name):
            return True
    if not parent:
        return False
    try:
        return hasattr(importlib.import_module(parent), attribute)
    except ModuleNotFoundError:
        return False


def words(command: str) -> list[str]:
    """The arguments of an `edge-fl` command."""
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
def test_documented_commands_exist(app: Any, command: str) -> None:
    found, rest = _found(app, words(command))
    used = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
    assert used <= (known := _options(found)), f"{command}: unknown {', '.join(sorted(used - known))}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_that_are_not_run_have_a_reason(page: Path) -> None:
    unexplained = [
        command
        for block in blocks(page)
        if not block.is_run and not block.why
        for command in block.commands
        if command not in RUN
    ]
    assert not unexplained


def test_few_commands_are_not_run() -> None:
    excused = {c for page in PAGES for b in blocks(page) if not b.is_run for c in b.commands} - RUN
    assert len(excused) <= NOT_RUN_AT_MOST < len(excused) + 5, sorted(excused)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    assert not broken_links(page)


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text(
        "# One title\n## `code`, and more: 7. (x)\n```\n# no heading\n```\n## Twice\n## Twice\n"
    )
    page = tmp_path / "page.md"
    good = [
        "other.md",
        "other.md#one-title",
        "other.md#code-and-more-7-x",
        "other.md#twice-1",
        "#here",
        "https://example.com/#x",
    ]
    bad = ["missing.md", "other.md#two-titles", "other.md#no-heading", "other.md#twice-2", "#there"]
    page.write_text("# Here\n" + "\n".join(f"[text]({target})" for target in good + bad))
    assert broken_links(page) == bad


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    paths = {
        path
        for path in OUR_PATH.findall(text)
        if "NAME" not in path and not (ROOT / path.rstrip("/")).exists()
    }
    modules = {name for name in OUR_MODULE.findall(text) if not resolves(name)}
    assert not paths | modules


def test_missing_paths_and_modules_are_found() -> None:
    text = "`edge_fl/cli.py`, `edge_fl/no.py`, `edge_fl.cli`, `edge_fl.no`, `edge_fl.errors.ConfigError`, `edge_fl_server.no.x`"
    assert [path for path in OUR_PATH.findall(text) if not (ROOT / path).exists()] == ["edge_fl/no.py"]
    assert [name for name in OUR_MODULE.findall(text) if not resolves(name)] == [
        "edge_fl.no",
        "edge_fl_server.no.x",
    ]


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmStart]:
    with WarmStart() as started:
        yield started


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return agents.wheel(tmp_path_factory.mktemp("wheels"), "0.2.0")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("mosquitto_program")
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if not after(page) and any(b.is_run for b in blocks(page))],
    ids=lambda page: page.name,
)
def test_commands_of_a_page_run(app: Any, warm: WarmStart, wheel: Path, page: Path, tmp_path: Path) -> None:
    Image.linear_gradient("L").save(tmp_path / "photo.png")
    for name, number in product(("cat", "dog"), range(6)):
        (tmp_path / "pictures" / name).mkdir(parents=True, exist_ok=True)
        Image.effect_noise((32, 32), 20 * number + 10).save(tmp_path / "pictures" / name / f"{number}.png")
    _write_samples(tmp_path)
    shutil.copy(wheel, tmp_path)
    with recorded_network(tmp_path) as network, Session(app, warm, tmp_path, network) as session:
        for chapter in [page, *(other for other in PAGES if after(other) == page.name)]:
            for block in blocks(chapter):
                if named := re.match(r"# (\w+\.(?:py|toml))\n", block.text):
                    (tmp_path / named[1]).write_text(block.text)
            for block in blocks(chapter):
                if block.is_run:
                    session.run(block)
        assert not network.foreign()
    assert not (tmp_path / CACHE / "Microsoft").exists(), "onnxruntime's telemetry was on"


def _write_samples(folder: Path) -> None:
    """Write recordings/, people/ (of five wearers) and today.csv, two movements; sounds/ and today.wav, two pitches; flowers.csv; mine/."""
    rng, time = np.random.default_rng(0), np.arange(500)[:, None] / 50
    for number, (hz, movement, pitch) in product(range(10), ((1, "row", "low"), (3, "lift", "high"))):
        x = np.sin(2 * np.pi * hz * (1 + number / 20) * time + np.arange(3))
        rows = np.hstack([time, x + 0.1 * rng.standard_normal(x.shape)])
        clip = np.sin(2 * np.pi * (200 + 20 * number) * hz * np.arange(16_000, dtype=np.float32) / 16_000)
        for path in (
            f"recordings/{movement}/{number}",
            f"people/{number % 5}/{movement}/{number}",
            f"sounds/{pitch}/{number}",
            "today",
        ):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            if path.startswith("sounds") or path == "today":
                (folder / f"{path}.wav").write_bytes(audio.wav(clip / 2, 16_000))
            if not path.startswith("sounds"):
                np.savetxt(folder / f"{path}.csv", rows, "%.3f", ",", header="time,ax,ay,az", comments="")
    flowers = load_iris()
    names = flowers.target_names[flowers.target]
    table = [[*values, name] for values, name in zip(flowers.data, names, strict=True)]
    lines = [",".join(map(str, row)) for row in [[*flowers.feature_names, "species"], *table]]
    (folder / "flowers.csv").write_text("\n".join(lines))
    (folder / "mine").mkdir()


@dataclass
class Session:
    """Runs the commands of a page in one folder. Services are stopped at the end, and before a block of concurrent commands."""

    app: Any
    warm: WarmStart
    folder: Path
    network: Network

    def __enter__(self) -> "Session":
        self._serving: list[tuple[str, subprocess.Popen[str] | Command, Path]] = []
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        above = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        self._variables = {**os.environ, "PATH": path, "PYTHONPATH": above, "OMP_NUM_THREADS": "1"}
        self._variables["XDG_CACHE_HOME"] = str(self.folder / CACHE)
        for name in edge_fl.TELEMETRY_OFF:  # set by the import of edge_fl in this process
            self._variables.pop(name, None)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, block: Block) -> None:
        """Run a block. Raises AssertionError with the output of a failed command."""
        wanted = [self._as_run(command, block) for command in block.commands]
        headings = {self._as_run(command, block): cells for command, cells in block.headings.items()}
        if at_once := "run side by side" in block.notes:
            self._stop()
        for number, command in enumerate(wanted):
            self._start(command)
            if not at_once or number == len(wanted) - 1:
                printed = self._wait()
                missing = [cell for cell in headings.get(command, ()) if cell not in printed]
                assert not missing, f"$ {command}\nno {missing} in\n{printed[:2000]}"
            else:
                time.sleep(SETTLE_S)  # the order is free; a running broker only saves retries
        for command, process, output in self._serving[:-1]:
            assert process.poll() in (None, 0), f"$ {command}\n{output.read_text()[-2000:]}"

    def _as_run(self, command: str, block: Block) -> str:
        for note in block.notes:
            if here := re.fullmatch(r"run where (\S+) is (\S+)", note):
                command = command.replace(here[1], here[2])
            for_some = re.match(r"run (\S+ \S+ )?with ", note)
            if for_some and command.startswith(f"edge-fl {for_some[1] or ''}"):
                found, _ = _found(self.app, words(command))
                options = re.findall(r"--\S+(?: [^-]\S*)?", note)
                command = " ".join([command, *(o for o in options if o.split()[0] in _options(found))])
        return command

    def _start(self, command: str) -> None:
        output = self.folder / f".output-{len(self._serving)}"
        program, *arguments = shlex.split(command)
        if program == "edge-fl":
            process = self.warm.start(arguments, self.folder, output, self._variables, self.network.namespace)
        else:
            process = self._popen([program, *arguments], output)
        self._serving.append((command, process, output))

    def _popen(self, command: list[str], output: Path) -> subprocess.Popen[str]:
        with output.open("w") as file:
            return subprocess.Popen(
                [*self.network.prefix, *command],
                cwd=self.folder,
                env=self._variables,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def _wait(self) -> str:
        """Wait for the newest command to succeed -> its output."""
        command, process, output = self._serving[-1]
        code, printed = process.wait(DEADLINE_S), output.read_text()
        assert code == 0, f"$ {command}\n{printed[-2000:]}"
        return printed

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


def _found(app: Any, words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and its arguments."""
    found, rest = app, words
    while rest and hasattr(found, "commands") and not rest[0].startswith("-"):
        assert rest[0] in found.commands, f"{' '.join(words)}: unknown command {rest[0]!r}"
        found, rest = found.commands[rest[0]], rest[1:]
    return found, rest


def _options(command: Any) -> set[str]:
    names = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return names | {"--help"}
