"""The server's commands, one file per group. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from edge_fl.cli import App
from edge_fl_server.cli import (
    compare,
    data,
    demo,
    fleet,
    lists,
    methods,
    new,
    recipes,
    release,
    report,
    runs,
    server,
    simulate,
)


def register(app: App) -> None:
    """Add the server's command groups and the researcher's commands to the application."""
    server.register(app)
    fleet.register(app)
    app.root.command()(demo.demo)
    release.register(app)
    app.root.command()(new.new)
    app.root.command()(simulate.simulate)
    runs.register(app)
    methods.register(app)
    lists.register(app)
    recipes.register(app)
    data.register(app)
    app.root.command()(compare.compare)
    report.register(app)
