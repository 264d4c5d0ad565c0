"""`edge-fl runs list`: earlier runs and their final states."""

from __future__ import annotations

from edge_fl.cli import App
from edge_fl.console.output import Format, print_status, show_table
from edge_fl.console.tables import Column
from edge_fl.files.paths import text
from edge_fl.options import FormatOption
from edge_fl_server.cli.options import RUNS, RunsOption


def register(app: App) -> None:
    """Add `runs list`."""
    runs = app.group("runs", "Earlier runs and their final states.", "Research")
    runs.add(list_runs, "edge-fl runs list", name="list")


def list_runs(runs: RunsOption = RUNS, format: FormatOption = Format.TABLE) -> None:
    """List every run: method, dataset, source and final state."""
    import msgspec

    from edge_fl_server.runs import results

    columns = {
        **{name: name for name in ("run", "method", "dataset", "source", "state")},
        "reason": Column("reason", prose=True),
        "created": Column("created, UTC", lambda moment: str(moment)[:19].replace("T", " "), rank=1),
    }
    rows = [msgspec.to_builtins(run) for run in results.list_runs(runs)]
    show_table(rows, columns, format)
    if not rows:
        print_status(f"{text(runs)}: no runs")
