"""`edge-fl recipes list`."""

from __future__ import annotations

from edge_fl.cli import App
from edge_fl.console import units
from edge_fl.console.output import Format, show_table
from edge_fl.console.tables import Column
from edge_fl.options import FormatOption


def register(app: App) -> None:
    """Add the group `recipes`."""
    recipes = app.group("recipes", "The built-in recipes: the settings of the papers' tables.", "Research")
    recipes.add(list_recipes, "edge-fl recipes list", name="list")


def list_recipes(format: FormatOption = Format.TABLE) -> None:
    """List every recipe: method, dataset, partition, size, and the paper's table that it reproduces."""
    from edge_fl_server import recipes

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
            "title": recipes.title(name),
        })  # fmt: skip
    columns = {key: key for key in rows[0]} | {
        "participation": Column("participation", units.percent, rank=1),
        "title": Column("title", prose=True, rank=2),
    }
    show_table(rows, columns, format)
