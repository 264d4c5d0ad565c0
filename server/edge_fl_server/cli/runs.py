"""`edge-fl runs list` and `edge-fl recipes list`: earlier runs, and what a run can begin with."""

from edge_fl.cli import App
from edge_fl.console import units
from edge_fl.console.output import Format, print_status, show_table
from edge_fl.console.tables import Column
from edge_fl.files.paths import text
from edge_fl.options import FormatOption
from edge_fl_server.cli.options import RUNS, RunsOption


def register(app: App) -> None:
    """Add the groups `runs` and `recipes`."""
    runs = app.group("runs", "Earlier runs and their final states.", "Research")
    runs.add(list_runs, "edge-fl runs list", name="list")
    recipes = app.group("recipes", "The built-in recipes: the settings of the papers' tables.", "Research")
    recipes.add(list_recipes, "edge-fl recipes list", name="list")


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


def list_recipes(format: FormatOption = Format.TABLE) -> None:
    """List every recipe: method, dataset, partition, size, hours of its whole comparison, and the paper's table that it reproduces."""
    from edge_fl_server import recipes
    from edge_fl_server.recipes import hours

    rows = []
    for name in recipes.names():
        recipe = recipes.find(name)
        rows.append({
            "recipe": name,
            "method": recipe.method.name,
            "dataset": recipe.data.dataset,
            "partition": recipes.partition_label(recipe.data),
            "clients": recipe.data.clients,
            "participation": recipe.cohort.participation,
            "rounds": recipe.rounds,
            "hours": hours.of_comparison(recipe),
            "title": recipes.title(name),
        })  # fmt: skip
    columns = {key: key for key in rows[0]} | {
        "participation": Column("participation", units.percent, rank=1),
        "hours": Column("hours", _two_digits),
        "title": Column("title", prose=True, rank=2),
    }
    show_table(rows, columns, format)
    print_status(
        f"hours: about, of all methods and seeds of 'edge-fl compare --recipe NAME', on one core of {hours.costs().machine};"
        " with --estimate that command measures this machine"
    )


def _two_digits(hours: float | None) -> str:
    """The digits that an estimate has: 0.0036, 39, 7,000."""
    if hours is None:
        return units.NOTHING
    rounded = float(f"{hours:.2g}")
    return f"{rounded:g}" if rounded < 10 else f"{rounded:,.0f}"
