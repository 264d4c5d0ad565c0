"""Commands `edge-fl server dashboard` and `edge-fl report`; heavy modules are imported when one of them runs."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from edge_fl.cli import App
from edge_fl.console.output import print_status
from edge_fl_server.cli.options import HOME, DatabaseOption, FleetOption, HomeOption, RunsOption

Host = Annotated[
    str,
    typer.Option(
        metavar="HOST",
        rich_help_panel="Connection",
        help="Address to listen on; all but loopback require a login.",
    ),
]
Port = Annotated[
    int,
    typer.Option(
        metavar="N",
        rich_help_panel="Connection",
        min=0,
        max=65535,
        help="Port to listen on; 0 selects a free one.",
    ),
]


class ReportFormat(StrEnum):
    """Formats of a report."""

    HTML = "html"
    MD = "md"
    JSON = "json"


def register(app: App) -> None:
    """Add `server dashboard` and `report`."""
    app.group("server").add(dashboard, "edge-fl server dashboard --port 8080")
    app.root.add(report, "edge-fl report demo-20261120-101500", panel="Research")


def dashboard(
    database: DatabaseOption = "",
    fleet: FleetOption = "main",
    home: HomeOption = HOME,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate for TLS (PEM).")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Key of the certificate (PEM).")] = None,
    login: Annotated[
        bool, typer.Option("--login", help="Require a token on loopback too, for example behind a proxy.")
    ] = False,
    oidc: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Single sign-on with OpenID Connect: a TOML file (docs/running-a-fleet.md)."
        ),
    ] = None,
) -> None:
    """Show the fleet, its runs, releases and data in a browser; also serves /metrics for Prometheus.

    On addresses other than loopback a login is required: a personal token (edge-fl token create), or the shared one in
    EDGE_FL_DASHBOARD_TOKEN; if there is neither, a shared one is generated and printed.
    """
    from edge_fl_server.dashboard.serve import Settings, serve
    from edge_fl_server.registry import database as registries

    registry = registries.location(database, home)
    token = os.environ.get("EDGE_FL_DASHBOARD_TOKEN", "")
    serve(Settings(registry, fleet, home, host, port, token, cert, key, login, oidc), print_status)


def report(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run listed by 'edge-fl runs list', or its folder.")
    ],
    format: Annotated[
        ReportFormat,
        typer.Option(
            metavar="FORMAT", help="html writes RUN/report.html and prints its path; md and json are printed."
        ),
    ] = ReportFormat.HTML,
    runs: RunsOption = Path("runs"),
) -> None:
    """Write the report of a run: settings, data sent, accuracies (global, before and after personalisation), charts, versions."""
    from edge_fl_server.report import page
    from edge_fl_server.runs.results import Results

    results = Results.open(Path(run) if Path(run).is_dir() else runs / run)
    if format is ReportFormat.HTML:
        print(page.write(results))
    else:
        print(page.FORMATS[format](page.report(results)), end="")
