"""`edge-fl server dashboard` and `edge-fl server mcp`: the fleet in a browser, and for an assistant."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from edge_fl.cli import App
from edge_fl.console.output import print_status
from edge_fl_server.cli.options import HOME, DatabaseOption, FleetOption, HomeOption

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


def register(app: App) -> None:
    """Add `server dashboard` and `server mcp`."""
    group = app.group("server")
    group.add(dashboard, "edge-fl server dashboard --port 8080")
    group.add(mcp, "edge-fl server mcp")


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
    from edge_fl_console.dashboard.serve import Settings, serve
    from edge_fl_server.registry import database as registries

    registry = registries.location(database, home)
    token = os.environ.get("EDGE_FL_DASHBOARD_TOKEN", "")
    serve(Settings(registry, fleet, home, host, port, token, cert, key, login, oidc), print_status)


def mcp(database: DatabaseOption = "", fleet: FleetOption = "main", home: HomeOption = HOME) -> None:
    """Answer an assistant's questions about the fleet (Model Context Protocol, standard input and output); read-only."""
    from edge_fl_console import assistant
    from edge_fl_server.registry import Database, fleets
    from edge_fl_server.registry.database import location

    with closing(Database.existing(location(database, home))) as db:
        fleets.require(db, fleet)
        assistant.server(db, fleet).run()
