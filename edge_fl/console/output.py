"""Terminal output of commands: results and tables on stdout, status lines on stderr."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Any

from edge_fl import logs
from edge_fl.console.tables import Columns, Table, aligned_lines, fitted, listing, titled
from edge_fl.errors import InputError, encodable
from edge_fl.files.paths import text

QUIET = "EDGE_FL_QUIET"  # an environment variable, inherited by threads and child processes


class Format(StrEnum):
    """Output format of a listing."""

    TABLE = "table"
    JSON = "json"


def is_quiet() -> bool:
    """Whether `--quiet` was given to this process or its parent."""
    return bool(os.environ.get(QUIET))


def print_status(line: str) -> None:
    """Print one line on stderr, after what was printed before it, except under `--quiet`.

    It is a JSON log record when logs are JSON (`edge_fl.logs`).
    """
    with suppress(OSError):  # the reader has gone, which the next print says
        sys.stdout.flush()
    if logs.is_json():
        logging.getLogger("edge_fl").info(line)
    elif not is_quiet():
        with suppress(OSError):  # a full disk below stderr ends no run
            print(line, file=sys.stderr, flush=True)


def show_json(value: object) -> None:
    """Print a value as JSON on stdout."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(_encodable(value), enc_hook=str)).decode())


def _encodable(value: Any) -> Any:
    """The value with its paths, and texts that hold a part of one, as text that JSON takes."""
    match value:
        case str():
            return encodable(value)
        case PurePath():
            return text(value)
        case Mapping():
            return {_encodable(key): _encodable(each) for key, each in value.items()}
        case list() | tuple():
            return [_encodable(each) for each in value]
    return value


def show_paths(paths: Mapping[str, Path], format: Format = Format.TABLE) -> None:
    """Print the paths of written files on stdout, one per line; as JSON one object."""
    if format is Format.JSON:
        show_json(paths)
    else:
        print("\n".join(map(text, paths.values())))


def show_table(
    rows: Sequence[Mapping[str, Any]],
    columns: Columns,
    format: Format = Format.TABLE,
) -> None:
    """Print `rows` on stdout.

    JSON is a list of objects with exactly these keys and unrounded values. A table is fitted to a terminal, and complete elsewhere.
    """
    if format is Format.JSON:
        show_json([{key: row.get(key) for key in columns} for row in rows])
    else:
        print("\n".join(terminal_lines(listing(rows, columns))))


def show_tables(tables: Sequence[Table]) -> None:
    """Print tables with their titles and notes on stdout."""
    for number, table in enumerate(tables):
        notes = [wrapped(note) for note in table.notes]
        found = replace(table, title=wrapped(table.title), notes=notes)
        print("\n" * (number > 0) + titled(found, terminal_lines(table)), end="")


def show_text(prose: str) -> None:
    """Print prose on stdout."""
    print(wrapped(prose))


def wrapped(prose: str) -> str:
    """Wrap prose between words if stdout is a terminal."""
    if not sys.stdout.isatty():
        return prose
    width = shutil.get_terminal_size().columns
    return "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in prose.splitlines())


def terminal_lines(table: Table) -> list[str]:
    """Format a table for stdout: fitted to its width if it is a terminal, else complete with one line per row."""
    if not sys.stdout.isatty():
        return aligned_lines(table)
    return fitted(table, shutil.get_terminal_size().columns)


def confirm(question: str, yes: bool) -> None:
    """Return if the answer is yes. Raises InputError for any other, and without a terminal to ask on."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(f"{question} No terminal to ask on: expected --yes")
    import typer

    if not typer.confirm(question, err=True):
        raise InputError("not confirmed")
