"""What people look at: `edge-fl server dashboard`, `edge-fl report`. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from edge_fl.cli import App
from edge_fl.console.output import print_status
from server.cli.options import HOME, DatabaseOption, FleetOption, HomeOption, RunsOption

Host = Annotated[str, typer.Option(help="Where to listen; anything but loopback needs the token.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 is a free port.")]


class ReportFormat(StrEnum):
    """How a report is written."""

    HTML = "html"
    MD = "md"
    JSON = "json"


def register(app: App) -> None:
    """Adds `server dashboard` and `report`."""
    app.group("server").command()(dashboard)
    app.root.command()(report)


def dashboard(
    database: DatabaseOption = "",
    fleet: FleetOption = "main",
    home: HomeOption = HOME,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    cert: Annotated[
        Path | None, typer.Option(help="The certificate to serve with (PEM); speaks TLS.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The certificate's key (PEM).")] = None,
) -> None:
    """Look at the fleet, its runs, releases and data in a browser; also serves /metrics for Prometheus.

    Beyond loopback the token of EDGE_FL_DASHBOARD_TOKEN is asked for; without one, one is made up and printed.
    """
    from server.dashboard.serve import Settings, serve
    from server.registry import database as registries

    registry = registries.location(database, home)
    token = os.environ.get("EDGE_FL_DASHBOARD_TOKEN", "")
    serve(Settings(registry, fleet, home, host, port, token, cert, key), print_status)


def report(
    run: Annotated[str, typer.Argument(help="A run of 'edge-fl runs list', or its folder.")],
    format: Annotated[
        ReportFormat,
        typer.Option(help="html writes RUN/report.html and prints its path; md and json are printed."),
    ] = ReportFormat.HTML,
    runs: RunsOption = Path("runs"),
) -> None:
    """Write a run's report: settings, what left the devices, accuracies by their honest names, curves, worst devices, versions."""
    from server.report import page
    from server.runs.results import Results

    results = Results.open(Path(run) if Path(run).is_dir() else runs / run)
    if format is ReportFormat.HTML:
        print(page.write(results))
    else:
        print(page.FORMATS[format](page.report(results)), end="")
