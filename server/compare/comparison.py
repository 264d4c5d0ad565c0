"""A comparison from its grid to its files: run what is missing, sum up, save in every form.

FOLDER/cells/           one file per cell, see `cell`
FOLDER/table.txt, .md, .tex, .csv, .json
FOLDER/paper.txt, .md, .tex, .csv            beside the paper's figures, when asked for
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

import edge_fl
from edge_fl.errors import RunError
from edge_fl.files import atomic
from server.compare import cell as cells_of
from server.compare import jobs as pool
from server.compare import render
from server.compare.cell import Measured
from server.compare.grid import Cell, blocks
from server.compare.progress import Progress
from server.compare.render import TextTable
from server.compare.summary import Row
from server.compare.tables import record
from server.runs.provenance import commit
from server.training import study as studies


def run(cells: Sequence[Cell], folder: Path, jobs: int = 1, *, retry: bool = False) -> dict[str, Measured]:
    """Every cell by its key: kept from before, or run now. `retry` runs again what had failed. Raises DataError before anything ran."""
    unique = {cell.key: cell for cell in cells}
    kept = {key: one for key, cell in unique.items() if (one := cells_of.read(cell, folder))}
    found = {key: one for key, one in kept.items() if not (retry and one.failure)}
    todo = [cell for key, cell in unique.items() if key not in found]
    for _, inside in blocks(todo):
        studies.prepare(inside[0].recipe)
    with Progress(todo, len(found), jobs) as progress:

        def done(measured: Measured) -> None:
            found[measured.key] = measured
            progress.done(measured)

        pool.run(todo, folder, jobs, _commit(), done, progress.watch)
    return found


def save(
    folder: Path, name: str, tables: Sequence[TextTable], records: Sequence[Mapping[str, object]]
) -> list[Path]:
    """Writes `name`.txt, .md, .tex and .csv. Raises RunError when the disk does not take them."""
    contents = {ending: render.together(tables, ending) for ending in render.FORMATS}
    contents["csv"] = render.comma_separated(records)
    return [_write(folder / f"{name}.{ending}", content) for ending, content in contents.items()]


def save_rows(
    folder: Path, rows: Sequence[Row], cells: Sequence[Cell], found: Mapping[str, Measured]
) -> Path:
    """Writes table.json: every number of every row, and every cell's full recipe, commit and data hash."""
    runs = [
        {"method": cell.label, "key": cell.key, "commit": one.commit, "data_hash": one.data_hash, "recipe": one.recipe}
        for cell in cells
        if (one := found.get(cell.key))
    ]  # fmt: skip
    tree = {"rows": rows, "cells": runs}
    return _write(folder / "table.json", msgspec.json.format(msgspec.json.encode(tree)).decode())


def table_records(rows: Sequence[Row]) -> list[dict[str, object]]:
    """What the CSV of a table holds."""
    return [record(row) for row in rows]


def by_heading(table: TextTable) -> list[dict[str, object]]:
    """A table's cells by heading."""
    return [dict(zip(table.headings, row, strict=True)) for row in table.rows]


def commits(found: Mapping[str, Measured]) -> list[str]:
    """A note when cells were run by different states of this code, so that nobody compares them by mistake."""
    seen = sorted({one.commit[:12] for one in found.values() if one.commit})
    return [f"Cells come from different commits: {', '.join(seen)}."] if len(seen) > 1 else []


def _write(path: Path, content: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, content)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); the cells are kept") from error
    return path


def _commit() -> str:
    found = commit(Path(edge_fl.__file__).parent)
    return f"{found.sha}{'+' * found.dirty}" if found else ""
