"""What people look at: `edge-fl server dashboard`, `edge-fl report`. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from edge_fl.cli import App, say

Host = Annotated[str, typer.Option(help="Where to listen; anything but loopback needs the token.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 is a free port.")]


def register(app: App) -> None:
    """Adds `server dashboard` and `report`."""
    app.group("server").command()(dashboard)


def dashboard(
    database: Annotated[
        str,
        typer.Option(
            envvar="EDGE_FL_DATABASE",
            help="The registry: a file, or postgresql://user@host/name; by default server/registry.sqlite beside --home.",
        ),
    ] = "",
    fleet: Annotated[str, typer.Option(help="The fleet to show.")] = "main",
    home: Annotated[Path, typer.Option(help="Where the keys and the metadata of releases are kept.")] = Path(
        "runs/releases"
    ),
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
    from server.registry.database import FILE
    from server.view.dashboard.serve import Settings, serve

    registry = database or str(home.parent / "server" / FILE)
    token = os.environ.get("EDGE_FL_DASHBOARD_TOKEN", "")
    serve(Settings(registry, fleet, home, host, port, token, cert, key), say)
