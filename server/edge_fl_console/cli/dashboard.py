"""`edge-fl server dashboard` and `edge-fl server mcp`: the fleet in a browser, and for an assistant."""

import os
from contextlib import closing
from pathlib import Path
from typing import Annotated

from edge_fl.cli import App
from edge_fl.console.output import print_status
from edge_fl.options import CONNECTION, option
from edge_fl_server.cli.options import RegistryPlace

Host = Annotated[str, option("HOST", "Address to listen on; all but loopback require a login.", CONNECTION)]
Port = Annotated[int, option("N", "Port to listen on; 0 selects a free one.", CONNECTION, min=0, max=65535)]


def register(app: App) -> None:
    """Add `server dashboard` and `server mcp`."""
    group = app.group("server")
    group.add(dashboard, "edge-fl server dashboard --port 8080")
    group.add(mcp, "edge-fl server mcp")


def dashboard(
    host: Host = "127.0.0.1",
    port: Port = 8080,
    cert: Annotated[Path | None, option("--cert FILE", "Certificate for TLS (PEM).")] = None,
    key: Annotated[Path | None, option("--key FILE", "Key of the certificate (PEM).")] = None,
    login: Annotated[
        bool, option("--login", "Require a token on loopback too, for example behind a proxy.")
    ] = False,
    oidc: Annotated[
        Path | None,
        option("--oidc FILE", "Single sign-on with OpenID Connect: a TOML file (docs/running-a-fleet.md)."),
    ] = None,
    *,
    place: RegistryPlace,
) -> None:
    """Show the fleet, its runs, releases and data in a browser; also serves /metrics for Prometheus.

    On addresses other than loopback a login is required: a personal token (edge-fl token create), or the shared one in
    EDGE_FL_DASHBOARD_TOKEN; if there is neither, a shared one is generated and printed.
    """
    from edge_fl_console.dashboard.serve import DashboardSettings, serve

    token = os.environ.get("EDGE_FL_DASHBOARD_TOKEN", "")
    serve(
        DashboardSettings(place.location, place.fleet, place.home, host, port, token, cert, key, login, oidc),
        print_status,
    )


def mcp(
    place: RegistryPlace,
) -> None:
    """Answer an assistant's questions about the fleet (Model Context Protocol, standard input and output); read-only."""
    from edge_fl_console import assistant
    from edge_fl_server.registry import Database, fleets

    with closing(Database.existing(place.location)) as db:
        fleets.require(db, place.fleet)
        assistant.server(db, place.fleet).run()
