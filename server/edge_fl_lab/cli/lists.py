"""`edge-fl models list`, `edge-fl heads list` and `edge-fl datasets list`."""

from pathlib import Path
from typing import Annotated

from edge_fl.cli import App
from edge_fl.console.output import Format, show_table
from edge_fl.console.tables import Column, Columns
from edge_fl.options import DATA_DIR, FormatOption

DESCRIPTION = {"description": Column("description", prose=True)}


def register(app: App) -> None:
    """Add the groups `models`, `heads` and `datasets`."""
    for name, help, command in (
        ("models", "Networks: list them.", list_models),
        ("heads", "Personal heads: list them.", list_heads),
        ("datasets", "Datasets for research: list them.", list_datasets),
    ):
        app.group(name, help, "Research").add(command, f"edge-fl {name} list", name="list")


def list_models(format: FormatOption = Format.TABLE) -> None:
    """List the models for --model, with their options (--set model.options.NAME=VALUE) and the pretrained weights found here."""
    from edge_fl_lab import catalogue

    columns: Columns = {
        "name": "name",
        "options": Column("options", prose=True),
        **DESCRIPTION,
        "weights": "weights",
    }
    show_table(catalogue.models(), columns, format)


def list_heads(format: FormatOption = Format.TABLE) -> None:
    """List the heads for --head, those of installed packages included."""
    from edge_fl_lab import catalogue

    rows = catalogue.personal_heads()
    show_table(rows, {"name": "name", "package": "package", **DESCRIPTION}, format)


def list_datasets(
    data_dir: Annotated[Path, DATA_DIR] = Path(".data"), format: FormatOption = Format.TABLE
) -> None:
    """List the datasets for --dataset: the known ones, and the .npz files in the data folder."""
    from edge_fl.data import datasets

    rows = [
        {
            "name": listing.name,
            "available": listing.available,
            "classes": len(listing.classes) or None,
            "domains": ", ".join(listing.domains),
            "where": listing.where,
        }
        for listing in datasets.listings(data_dir)
    ]
    prose = {key: Column(key, prose=True) for key in ("domains", "where")}
    show_table(rows, {**{key: key for key in rows[0]}, **prose}, format)
