"""`edge-fl methods list` and `edge-fl methods show`."""

from __future__ import annotations

from typing import Annotated

import typer

from edge_fl.cli import App, FormatOption
from edge_fl.console.output import Format, show_json, show_table


def register(app: App) -> None:
    """Add the group `methods`."""
    methods = app.group("methods", "Federated methods.")
    methods.command("list")(list_methods)
    methods.command("show")(show_method)


def list_methods(format: FormatOption = Format.TABLE) -> None:
    """List every method: family, shared and personal parts, behaviour of head-only devices, paper."""
    from edge_fl_server.catalogue import COLUMNS, rows

    show_table(rows(), COLUMNS, format)


def show_method(
    name: str,
    model: Annotated[str, typer.Option(help="Model for which bytes are counted.")] = "cnn2",
    egress: Annotated[
        bool, typer.Option("--egress", help="Print only what may leave a device, by tier, as JSON.")
    ] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show one method: hyper-parameters with range and source, shared parts, bytes per round, deviations from the paper."""
    from edge_fl_server import catalogue

    if egress:
        print(catalogue.egress_json(name))
    elif format is Format.JSON:
        show_json(catalogue.facts(name, model))
    else:
        print(catalogue.describe(name, model))
