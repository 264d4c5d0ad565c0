"""The command `edge-fl`. Commands are loaded from the entry points "edge_fl.commands", so this package imports none of its siblings.

Each entry point is a function `register(app: App) -> None` in a package's `cli` module, which imports nothing heavy before a command runs.
Every error ends as one line on stderr and an exit code: 0 success, 1 run failed, 2 cannot connect or access denied, 3 deadline, 4 bad
input, 130 interrupted by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from edge_fl import __version__
from edge_fl.console import extras
from edge_fl.console.output import QUIET, Format
from edge_fl.errors import ConfigError, EdgeFLError, InputError

ENTRY_POINTS = "edge_fl.commands"
INTERRUPTED = 130
REPEATED_S = 1.0
PARENT = "EDGE_FL_PARENT"  # environment variable: the process that this command ends with
PR_SET_PDEATHSIG = 1
# click's ClickException, which typer contains but does not export: raised for an invalid command line
UsageError: type[Exception] = typer.BadParameter.__mro__[2]


_interrupted_s = -REPEATED_S

FormatOption = Annotated[
    Format, typer.Option("--format", help="Output format: table for reading, JSON for scripts.")
]
IdentityOption = Annotated[
    Path | None,
    typer.Option(
        "--identity",
        help="Folder with this client's certificate (edge-fl fleet enrol), or with username and password; enables TLS [plaintext].",
    ),
]


def fleet_name(name: str | None) -> str | None:
    """Validate the fleet name of an option. Raises ConfigError if it cannot be part of a topic."""
    from edge_fl.wire.topics import NAME

    if name is not None and not NAME.match(name):
        raise ConfigError(f"--fleet {name}: expected 1 to 32 of a-z, 0-9 and '-'")
    return name


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
        typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print results and errors, no progress.")] = False,
) -> None:
    """Personalised federated learning that reaches real devices."""
    if quiet:
        os.environ[QUIET] = "1"
    _show_help(context)


@dataclass
class App:
    """The command line under construction: commands are added to `root` or to a group, which several packages may share."""

    root: typer.Typer = field(
        default_factory=lambda: typer.Typer(
            callback=_start,
            invoke_without_command=True,
            add_completion=False,
            rich_markup_mode=None,  # plain help starts faster on a device and keeps [brackets]
            pretty_exceptions_enable=False,
        )
    )
    unavailable: dict[str, str] = field(default_factory=dict)
    _groups: dict[str, typer.Typer] = field(default_factory=dict)

    def group(self, name: str, help: str = "") -> typer.Typer:
        """Return the group `edge-fl NAME`, creating it if needed; the first help text given is kept."""
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
        """Keep only the group that `arguments` name, if any: typer otherwise builds every command at every start."""
        name = next((argument for argument in arguments if argument != "--quiet"), "")
        if name in self._groups:
            self.root.registered_commands = []
            self.root.registered_groups = [info for info in self.root.registered_groups if info.name == name]


def load(entry_points: Iterable[metadata.EntryPoint]) -> App:
    """Build an App from all entry points; one that cannot be imported is listed in `unavailable` and does not affect the others."""
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
    """Run one command (default: the process's arguments) and return its exit code. Never raises and never prints a traceback."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        if is_main_thread:
            signal.signal(signal.SIGTERM, _interrupt)
            if parent := os.environ.pop(PARENT, ""):
                _end_with(int(parent))
        app = load(metadata.entry_points(group=ENTRY_POINTS))
        return _run(app, list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    finally:
        if is_main_thread:
            signal.signal(signal.SIGTERM, before)


def _end_with(parent: int) -> None:
    """Receive SIGTERM when the process `parent`, which started this command, ends in any way (on Linux)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM as Ctrl-C. Repetitions are ignored: 'timeout' sends two signals, and the second one would disturb the clean-up."""
    global _interrupted_s
    now_s = time.monotonic()
    repeated, _interrupted_s = now_s - _interrupted_s < REPEATED_S, now_s
    if not repeated:
        raise KeyboardInterrupt


def _run(app: App, arguments: list[str]) -> int:
    app.narrow(arguments)
    try:
        code = app.root(arguments, prog_name="edge-fl", standalone_mode=False)
        if code == INTERRUPTED:  # typer caught the KeyboardInterrupt
            return _fail("interrupted", code)
        return code if isinstance(code, int) else 0
    except EdgeFLError as error:
        return _fail(str(error), error.exit_code)
    except UsageError as error:
        return _fail(_usage(error, app), InputError.exit_code)
    except typer.Abort as error:
        return _fail("interrupted", INTERRUPTED if isinstance(error.__cause__, KeyboardInterrupt) else 1)
    except MemoryError as error:
        return _fail(f"out of memory: {error}; no result", EdgeFLError.exit_code)
    except Exception as error:
        return _fail(extras.hint(error) or _bug(error), EdgeFLError.exit_code)


def _fail(message: str, code: int) -> int:
    print("edge-fl:", " ".join(message.split()), file=sys.stderr)
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
    """Write the traceback of an unexpected error to a file and describe both in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
    # The name identifies the place of the error: repeated errors overwrite one file.
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
    return f"unexpected {type(error).__name__}: {error} ({where}); this is a bug, its traceback could not be saved"


def cache_folder() -> Path:
    """The cache folder of this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge-fl"
