"""The server's commands, one file per group. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from edge_fl.cli import App
from edge_fl_server.cli import (
    compare,
    data,
    demo,
    device,
    fleet,
    fleet_members,
    lists,
    methods,
    new,
    people,
    recipes,
    release,
    report,
    runs,
    server,
    simulate,
)


def register(app: App) -> None:
    """Add the server's command groups and the researcher's commands to the application."""
    app.root.add(demo.demo, "edge-fl demo", panel="Start")
    app.root.add(new.new, "edge-fl new pets --images pictures", panel="Start")
    app.root.add(simulate.simulate, simulate.EXAMPLE, panel="Research")
    app.root.add(compare.compare, compare.EXAMPLE, panel="Research")
    report.register(app)
    runs.register(app)
    methods.register(app)
    lists.register(app)
    recipes.register(app)
    data.register(app)
    server.register(app)
    fleet.register(app)
    fleet_members.register(app)
    people.register(app)
    device.register(app)
    release.register(app)
