"""The command `edge-fl`: it loads its commands from the entry points "edge_fl.commands", so that the floor imports nothing upwards.

Each entry point is a function `register(app: App) -> None` in a package's `cli.py`, which imports nothing heavy until a command
runs. Whatever goes wrong ends here as one line on stderr and an exit code: 0 ok, 1 the run failed, 2 cannot connect or not allowed,
3 deadline, 4 bad input, 130 interrupted.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from edge_fl import __version__
from edge_fl.console import extras
from edge_fl.console.output import QUIET, Format
from edge_fl.errors import ConfigError, EdgeFLError, InputError

ENTRY_POINTS = "edge_fl.commands"
INTERRUPTED = 130
# What typer raises for a wrong command line: click's ClickException, which typer contains but does not export.
UsageError: type[Exception] = typer.BadParameter.__mro__[2]


FormatOption = Annotated[
    Format, typer.Option("--format", help="How to print: a table for people, JSON for programs.")
]
IdentityOption = Annotated[
    Path | None,
    typer.Option(
        "--identity",
        help="The folder of this client's identity (edge-fl fleet enrol), for TLS [plaintext].",
    ),
]


def fleet_name(name: str | None) -> str | None:
    """For every option that takes a fleet's name. Raises ConfigError for one that cannot stand in a topic."""
    from edge_fl.wire.topics import NAME

    if name is not None and not NAME.match(name):
        raise ConfigError(f"--fleet {name}: expected 1 to 32 of a-z, 0-9 and '-'")
    return name


def _show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _show_version(asked: bool) -> None:
    if asked:
        print(f"edge-fl {__version__}")
        raise typer.Exit


def _start(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and stop.", callback=_show_version, is_eager=True),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print results and errors, no progress.")] = False,
) -> None:
    """Personalised federated learning that reaches real devices."""
    if quiet:
        os.environ[QUIET] = "1"
    _show_help(context)


@dataclass
class App:
    """The command line under construction: commands go to `root`, or to a group that several packages may share."""

    root: typer.Typer = field(
        default_factory=lambda: typer.Typer(
            callback=_start,
            invoke_without_command=True,
            add_completion=False,
            rich_markup_mode=None,  # plain help starts faster on a device, and keeps [brackets]
            pretty_exceptions_enable=False,
        )
    )
    unavailable: dict[str, str] = field(default_factory=dict)
    _groups: dict[str, typer.Typer] = field(default_factory=dict)

    def group(self, name: str, help: str = "") -> typer.Typer:
        """The group `edge-fl NAME`, made by whoever asks first; the first help text given stays."""
        if name not in self._groups:
            self._groups[name] = typer.Typer(
                callback=_show_help, invoke_without_command=True, rich_markup_mode=None
            )
            self.root.add_typer(self._groups[name], name=name)
        group = self._groups[name]
        if help and not isinstance(group.info.help, str):
            group.info.help = help
        return group

    def narrow(self, arguments: Sequence[str]) -> None:
        """Leaves only the group that `arguments` name, if they name one: typer builds every command that it knows, at every start."""
        name = next((argument for argument in arguments if argument != "--quiet"), "")
        if name in self._groups:
            self.root.registered_commands = []
            self.root.registered_groups = [info for info in self.root.registered_groups if info.name == name]


def load(entry_points: Iterable[metadata.EntryPoint]) -> App:
    """An App with every entry point's commands; one that cannot be imported is noted in `unavailable` and hinders no other."""
    app = App()
    for point in sorted(entry_points, key=lambda point: point.name):
        try:
            point.load()(app)
        except Exception as error:
            app.unavailable[point.name] = extras.hint(error) or f"{type(error).__name__}: {error}"
    if app.unavailable:
        app.root.info.epilog = f"Unavailable: {_reasons(app)}."
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command (default: the process's arguments) and returns its exit code; never raises, never prints a traceback."""
    try:
        app = load(metadata.entry_points(group=ENTRY_POINTS))
        return _run(app, list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


def _run(app: App, arguments: list[str]) -> int:
    app.narrow(arguments)
    try:
        code = app.root(arguments, prog_name="edge-fl", standalone_mode=False)
        if code == INTERRUPTED:  # typer has caught it
            return _fail("interrupted", code)
        return code if isinstance(code, int) else 0
    except EdgeFLError as error:
        return _fail(str(error), error.exit_code)
    except UsageError as error:
        return _fail(_usage(error, app), InputError.exit_code)
    except typer.Abort as error:
        return _fail("interrupted", INTERRUPTED if isinstance(error.__cause__, KeyboardInterrupt) else 1)
    except Exception as error:
        return _fail(extras.hint(error) or _bug(error), EdgeFLError.exit_code)


def _fail(message: str, code: int) -> int:
    print("edge-fl:", " ".join(message.split()), file=sys.stderr)
    return code


def _usage(error: Any, app: App) -> str:
    """What typer says, the command it concerns, and, when a command is unknown, what could not be loaded."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "edge-fl"
    hint = f" ({_reasons(app)})" if app.unavailable and "No such command" in error.format_message() else ""
    return f"{error.format_message().rstrip('.')}{hint}; nothing was changed, see '{command} --help'"


def _reasons(app: App) -> str:
    return ", ".join(f"{name} ({reason})" for name, reason in app.unavailable.items())


def _bug(error: BaseException) -> str:
    """One line about an error that nobody foresaw, and the file that its traceback was written to."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
    # Named after the place, so that a device that meets the same bug every minute keeps one file and not thousands.
    place = hashlib.blake2b(
        "".join(f"{f.filename}:{f.lineno}" for f in frames).encode(), digest_size=4
    ).hexdigest()
    text = "".join(traceback.format_exception(error))
    for folder in (cache_folder(), Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (path := folder / f"traceback-{place}.txt").write_text(text)
        except OSError:
            continue
        return (
            f"unexpected {type(error).__name__}: {error} ({where}); this is a bug, its traceback is in {path}"
        )
    return f"unexpected {type(error).__name__}: {error} ({where}); this is a bug, no folder could take its traceback"


def cache_folder() -> Path:
    """Where this user's caches lie, per program."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge-fl"
