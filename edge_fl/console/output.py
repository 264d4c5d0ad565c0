"""Terminal output of commands: results and tables on stdout, status lines on stderr."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

from edge_fl import logs
from edge_fl.console.tables import Table, aligned_lines, cell_text, rich_table

QUIET = "EDGE_FL_QUIET"  # an environment variable, inherited by threads and child processes


class Format(StrEnum):
    """Output format of a listing."""

    TABLE = "table"
    JSON = "json"


def is_quiet() -> bool:
    """Whether `--quiet` was given to this process or its parent."""
    return bool(os.environ.get(QUIET))


def print_status(line: str) -> None:
    """Print one line on stderr, except under `--quiet`; as a JSON log record when logs are JSON (`edge_fl.logs`)."""
    if logs.is_json():
        logging.getLogger("edge_fl").info(line)
    elif not is_quiet():
        with suppress(OSError):  # a full disk below stderr ends no run
            print(line, file=sys.stderr, flush=True)


def show_json(value: object) -> None:
    """Print a value as JSON on stdout."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value, enc_hook=str)).decode())


def show_paths(paths: Mapping[str, Path], format: Format = Format.TABLE) -> None:
    """Print the paths of written files on stdout, one per line; as JSON one object."""
    if format is Format.JSON:
        show_json(paths)
    else:
        print("\n".join(map(str, paths.values())))


def show_table(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], format: Format = Format.TABLE
) -> None:
    """Print `rows` on stdout; `columns` maps a row's key to its heading.

    JSON is a list of objects with exactly these keys and unrounded values. A table is drawn by rich on a terminal, otherwise plain text.
    """
    if format is Format.JSON:
        chosen = [{key: row.get(key) for key in columns} for row in rows]
        show_json(chosen)
        return
    table = Table(list(columns.values()), [[cell_text(row.get(key)) for key in columns] for row in rows])
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(rich_table(table))
    else:
        print("\n".join(aligned_lines(table)))
