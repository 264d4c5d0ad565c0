"""Run a comparison: execute the missing cells, then write the tables.

FOLDER/cells/                                one file per cell, see `cell`
FOLDER/table.txt, .md, .tex, .csv, .json
FOLDER/curves.csv                            accuracy, bytes and processor time after each round of each cell
FOLDER/paper.txt, .md, .tex, .csv            comparison with the paper's figures, on request
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

import edge_fl
from edge_fl.console import tables as renderers
from edge_fl.console.output import print_status
from edge_fl.console.tables import Table
from edge_fl.data import partition
from edge_fl.data.partition import DataConfig
from edge_fl.errors import RunError
from edge_fl.files import atomic, paths
from edge_fl_lab.compare import cell_runs, inputs, summary
from edge_fl_lab.compare import jobs as pool
from edge_fl_lab.compare.cell_runs import CellResult
from edge_fl_lab.compare.grid import Cell
from edge_fl_lab.compare.progress import CellProgress
from edge_fl_lab.compare.summary import MethodRow
from edge_fl_lab.compare.tuned import TunedRow
from edge_fl_server.orchestrate import execution
from edge_fl_server.runs.results import commit


def run(cells: Sequence[Cell], folder: Path, jobs: int = 1, *, retry: bool = False) -> dict[str, CellResult]:
    """Return every cell's result by key, stored or new; cells whose inputs changed are run again, with `retry` failed ones too.

    Raises InputError before anything runs if any cell has no data, no valid method or no model.
    """
    unique = {cell.key: cell for cell in cells}
    found = check(list(unique.values()))
    stored = {key: result for key, cell in unique.items() if (result := cell_runs.read(cell, folder))}
    changes = {key: inputs.changes(result.inputs, found[key]) for key, result in stored.items()}
    results = {
        key: result for key, result in stored.items() if not changes[key] and not (retry and result.failure)
    }
    todo = [cell for key, cell in unique.items() if key not in results]
    for reason, count in Counter(reason for reasons in changes.values() for reason in reasons).items():
        print_status(f"rerun of {count} cell{'s' * (count != 1)}: {reason}")
    with CellProgress(todo, len(results), jobs) as progress:

        def done(result: CellResult) -> None:
            results[result.key] = result
            progress.done(result)

        pool.run(todo, folder, jobs, _commit(), done, progress)
    return results


def check(cells: Sequence[Cell]) -> dict[str, dict[str, str]]:
    """Load every dataset, draw every split, build every method -> the inputs of each cell. Raises InputError."""
    found, built, gaps = {}, set(), set()
    for cell in cells:
        study = cell_runs.prepare(cell)
        gaps.update(partition.gaps(study.dataset, study.split))
        settings = msgspec.structs.replace(cell.recipe, seed=0, data=DataConfig())
        kind = msgspec.json.encode([settings, study.dataset.input, study.dataset.classes])
        if kind not in built:  # seeds and splits make no difference
            execution.of_study(study)
            built.add(kind)
        found[cell.key] = inputs.of_study(study)
    for line in sorted(gaps):
        print_status(line)
    return found


def text(tables: Sequence[Table], ending: str = "txt") -> str:
    """Format several tables as one file."""
    return "\n".join(renderers.RENDERERS[ending](table) for table in tables)


def save(folder: Path, name: str, tables: Sequence[Table], records: Sequence[Mapping[str, object]]) -> None:
    """Write `name`.txt, .md and .tex from the tables, and .csv from the records. Raises RunError if they cannot be written."""
    for ending in renderers.RENDERERS:
        _write(folder / f"{name}.{ending}", text(tables, ending))
    _write(folder / f"{name}.csv", renderers.csv_text(records))


def save_rows(
    folder: Path,
    rows: Sequence[MethodRow],
    cells: Sequence[Cell],
    results: Mapping[str, CellResult],
    tuning: Sequence[TunedRow] = (),
) -> Path:
    """Write table.json: every number of every row, and every cell's full recipe, commit, engine and inputs."""
    runs = [
        {
            "method": cell.label,
            "key": cell.key,
            "commit": result.commit,
            "engine": result.engine,
            "inputs": result.inputs,
            "recipe": result.recipe,
        }
        for cell in cells
        if (result := results.get(cell.key))
    ]
    tree = {"rows": rows, "cells": runs, **({"tuning": tuning} if tuning else {})}
    return _write(folder / "table.json", msgspec.json.format(msgspec.json.encode(tree)).decode())


def save_curves(folder: Path, cells: Sequence[Cell], results: Mapping[str, CellResult]) -> Path:
    """Write curves.csv: a line per round of each cell, and a last one for the final personalisation."""
    lines = [
        line for cell in cells if (result := results.get(cell.key)) for line in summary.curve(cell, result)
    ]
    return _write(folder / "curves.csv", renderers.csv_text(lines))


def records(table: Table) -> list[dict[str, object]]:
    """A table's rows as dicts by heading."""
    return [dict(zip(table.headings, row, strict=True)) for row in table.rows]


def _write(path: Path, content: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(path, content)
    except OSError as error:
        raise RunError(
            f"{paths.text(path)}: cannot be written ({error.strerror}); the cells are kept"
        ) from error
    return path


def _commit() -> str:
    state = commit(Path(edge_fl.__file__).parent)
    return f"{state.sha}{'+' * state.dirty}" if state else ""
