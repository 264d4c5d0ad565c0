"""The command `edge-fl`. Commands are loaded from the entry points "edge_fl.commands", so this package imports none of its siblings.

Each entry point is a function `register(app: App) -> None` in a package's `cli` module, which imports nothing heavy before a command runs.
Every error ends as one line on stderr and an exit code: 0 success, 1 run failed, 2 cannot connect or access denied, 3 deadline or gate,
4 bad input, 130 stopped by Ctrl-C, 143 stopped by SIGTERM, 141 standard output was closed by its reader. A command that serves until it is
stopped ends with 0 by either signal (`edge_fl.signals.serving`).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.main import get_command

from edge_fl import __version__
from edge_fl.console.help import CONTEXT, Group, HelpCommand
from edge_fl.console.output import QUIET
from edge_fl.errors import EdgeFLError, InputError, encodable
from edge_fl.files import paths
from edge_fl.options import Expanded, option
from edge_fl.signals import Terminated, interrupting, stop_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "edge_fl.commands"
CORE = ("broker", "devices", "server")  # their commands are listed before those of extensions
COMPLETE = "_EDGE_FL_COMPLETE"  # environment variable: a shell asks for completions of its command line
OUTPUT_CLOSED = 141  # 128 + SIGPIPE
PARENT = "EDGE_FL_PARENT"  # environment variable: the process that this command ends with
PR_SET_PDEATHSIG = 1
# click's ClickException, which typer contains but does not export: raised for an invalid command line
UsageError: type[Exception] = typer.BadParameter.__mro__[2]


def _show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _show_version(requested: bool) -> None:
    if requested:
        print(f"edge-fl {__version__}")
        raise typer.Exit


def _start(
    context: typer.Context,
    version: Annotated[
        bool,
        option("--version", "Print the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
    quiet: Annotated[bool, option("--quiet", "Print results and errors, no progress.")] = False,
) -> None:
    """Personalised federated learning that reaches real devices."""
    if quiet:
        os.environ[QUIET] = "1"
    _show_help(context)


class Commands(typer.Typer):
    """A group of commands under construction."""

    def __init__(self, callback: Callable[..., object] = _show_help, **options: Any) -> None:
        super().__init__(
            cls=Group,
            callback=callback,
            invoke_without_command=True,
            rich_markup_mode=None,  # plain help starts faster on a device and keeps [brackets]
            **options,
        )

    def add(self, function: Callable[..., Any], example: str, *, name: str = "", panel: str = "") -> None:
        """Add a command, named like its function by default; `example` is a command line, or several lines."""
        name = name or function.__name__.replace("_", "-")
        self.command(name, cls=HelpCommand, epilog=example, rich_help_panel=panel or None)(Expanded(function))


@dataclass
class App:
    """The command line under construction: commands are added to `root` or to a group, which several packages may share."""

    root: Commands = field(
        default_factory=lambda: Commands(_start, context_settings=CONTEXT, pretty_exceptions_enable=False)
    )
    unavailable: dict[str, str] = field(default_factory=dict)
    _groups: dict[str, Commands] = field(default_factory=dict)

    def group(self, name: str, help: str = "", panel: str = "") -> Commands:
        """Return the group `edge-fl NAME`, creating it if needed; the first help text and the first panel given are kept."""
        if name not in self._groups:
            self._groups[name] = Commands(add_completion=False)
            self.root.add_typer(self._groups[name], name=name)
        group = self._groups[name]
        if help and not isinstance(group.info.help, str):
            group.info.help = help
        if panel and not isinstance(group.info.rich_help_panel, str):
            group.info.rich_help_panel = panel
        return group


def named(group: typer.Typer, arguments: Sequence[str]) -> typer.Typer:
    """A copy of `group` with only the command that `arguments` name, or else with names and help alone: typer builds all it is given."""
    found, words = copy(group), iter(arguments)
    name = next((word for word in words if not word.startswith("-")), "")
    commands = [info for info in group.registered_commands if info.name == name]
    groups = [info for info in group.registered_groups if info.name == name]
    if commands or groups:
        found.registered_commands, rest = commands, list(words)
    else:
        found.registered_commands = [_without_options(info) for info in group.registered_commands]
        groups, rest = group.registered_groups, []
    found.registered_groups = [copy(info) for info in groups]
    for info in found.registered_groups:
        if info.typer_instance:
            info.typer_instance = named(info.typer_instance, rest)
    return found


def _without_options(command: Any) -> Any:
    """A copy of typer's description of a command with its help, but without its function and so without options."""
    found = copy(command)
    found.help, found.callback = getdoc(command.callback), lambda: None
    return found


def load(entry_points: Iterable[EntryPoint]) -> App:
    """Build an App from all entry points; one that cannot be imported is listed in `unavailable` and does not affect the others."""
    app = App()
    for point in sorted(entry_points, key=lambda point: (point.name not in CORE, point.name)):
        try:
            point.load()(app)
        except Exception as error:
            from edge_fl.console import extras

            app.unavailable[point.name] = extras.hint(error) or f"{type(error).__name__}: {error}"
    if app.unavailable:
        app.root.info.epilog = f"Unavailable: {_reasons(app)}."
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command (default: the process's arguments) and return its exit code. Never raises and never prints a traceback."""
    from importlib import metadata

    try:
        with interrupting():
            if parent := os.environ.pop(PARENT, ""):
                _end_with(int(parent))
            app = load(metadata.entry_points(group=ENTRY_POINTS))
            return _run(app, list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt as error:
        return _fail(*stop_of(error))


def _end_with(parent: int) -> None:
    """Receive SIGTERM when the process `parent`, which started this command, ends in any way (on Linux)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before
        raise Terminated


def _run(app: App, arguments: list[str]) -> int:
    try:
        code = _invoke(app, arguments)
    except (KeyboardInterrupt, typer.Exit, Exception) as error:
        code = _exit_code(error, app, arguments)
    if lost := _flush(sys.stdout):
        return _output_lost(lost)
    return code


def _invoke(app: App, arguments: list[str]) -> int:
    if COMPLETE in os.environ:
        get_command(app.root)(arguments, prog_name="edge-fl")
    command = get_command(named(app.root, arguments))
    with command.make_context("edge-fl", arguments) as context:
        code = command.invoke(context)
    return code if isinstance(code, int) else 0


def _exit_code(error: BaseException, app: App, arguments: Sequence[str]) -> int:
    """Print the line of an error, if it has one, and return its exit code."""
    match error:
        case typer.Exit():
            return error.exit_code
        case KeyboardInterrupt():
            return _fail(*stop_of(error))
        case EdgeFLError():
            return _fail(str(error), error.exit_code)
        case UsageError():
            return _fail(_usage(error, app), InputError.exit_code)
        case typer.Abort() if isinstance(error.__cause__, KeyboardInterrupt):
            return _fail(*stop_of(error.__cause__))
        case typer.Abort():
            return _fail("no answer; nothing was changed", EdgeFLError.exit_code)
        case MemoryError():
            return _fail(f"out of memory: {error}; no result", EdgeFLError.exit_code)
        case OSError() if lost := _flush(sys.stdout, probe="\n"):
            return _output_lost(lost)
        case PermissionError() if isinstance(error.filename, (str, bytes)):
            # a folder on the way may be closed
            from edge_fl.files.accounts import not_allowed

            refused = not_allowed(Path(os.fsdecode(error.filename)), "use")
            return _fail(f"{refused}; this command ended", InputError.exit_code)
        case UnicodeEncodeError() if given := [word for word in arguments if not paths.is_utf8(word)]:
            what = f"argument '{paths.text(given[0])}': not UTF-8, which this command stores or sends"
            return _fail(f"{what}; expected UTF-8, for a path a link to it (ln -s)", InputError.exit_code)
    from edge_fl.console import extras

    return _fail(extras.hint(error) or _bug(error), EdgeFLError.exit_code)


def _flush(stream: TextIO, probe: str = "") -> OSError | None:
    """Write `probe` and what is buffered. On an error, return it and discard this and all later output."""
    try:
        stream.write(probe)
        stream.flush()
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return error
    return None


def _output_lost(error: OSError) -> int:
    if isinstance(error, BrokenPipeError):  # the reader, such as head, has enough
        return OUTPUT_CLOSED
    return _fail(f"standard output: {error.strerror}; the output is not complete", EdgeFLError.exit_code)


def _fail(message: str, code: int) -> int:
    with suppress(OSError):
        print("edge-fl:", encodable(" ".join(message.split())), file=sys.stderr)
    _flush(sys.stderr)
    return code


def _usage(error: Any, app: App) -> str:
    """typer's message, the command it concerns, and for an unknown command the entry points that could not be loaded."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "edge-fl"
    hint = f" ({_reasons(app)})" if app.unavailable and "No such command" in error.format_message() else ""
    return f"{error.format_message().rstrip('.')}{hint}; nothing was changed, see '{command} --help'"


def _reasons(app: App) -> str:
    return ", ".join(f"{name} ({reason})" for name, reason in app.unavailable.items())


def _bug(error: BaseException) -> str:
    """Write the traceback of an unexpected error to a file and describe both in one line; a user's own code is named."""
    import hashlib
    import tempfile
    import traceback

    from edge_fl import plugins

    frames = traceback.extract_tb(error.__traceback__)
    where = f"{paths.text(Path(frames[-1].filename).name)}:{frames[-1].lineno}"
    # The name identifies the place of the error: repeated errors overwrite one file.
    place = hashlib.blake2b(
        "".join(f"{f.filename}:{f.lineno}" for f in frames).encode(), digest_size=4
    ).hexdigest()
    lines = encodable("".join(traceback.format_exception(error)))
    for folder in (cache_folder(), Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (path := folder / f"traceback-{place}.txt").write_text(lines, "utf-8")
        except OSError:
            continue
        kept = f"is in {paths.text(path)}"
        break
    else:
        kept = "could not be saved"
    if plugins.own_line(error):
        return f"{plugins.described(error)}; this is code of your own, its traceback {kept}"
    return f"unexpected {type(error).__name__}: {error} ({where}); this is a bug, its traceback {kept}"


def cache_folder() -> Path:
    """The cache folder of this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge-fl"
