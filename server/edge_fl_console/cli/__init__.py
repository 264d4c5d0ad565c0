"""The operator's commands for people: dashboard, logins, audit log, alerts. Nothing heavy is imported before a command runs."""

from edge_fl.cli import App
from edge_fl_console.cli import alerts, dashboard, people


def register(app: App) -> None:
    """Add `server dashboard` and `server mcp`, the group `token`, `fleet audit` and `fleet alerts`."""
    for module in (dashboard, people, alerts):
        module.register(app)
