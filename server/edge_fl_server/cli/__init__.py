"""The server's commands, one file per group. Nothing heavy is imported before a command runs."""

from edge_fl.cli import App
from edge_fl_server.cli import device, fleet, new, release, runs, server


def register(app: App) -> None:
    """Add `new` and the groups `runs`, `recipes`, `server`, `fleet`, `device` and `release`."""
    app.root.add(new.new, "edge-fl new pets --images pictures", panel="Start")
    for module in (runs, server, fleet, device, release):
        module.register(app)
