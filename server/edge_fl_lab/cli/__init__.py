"""The researcher's commands. Nothing heavy is imported before a command runs."""

from edge_fl.cli import App
from edge_fl_lab.cli import compare, data, demo, lists, methods, runs, simulate


def register(app: App) -> None:
    """Add the demo, and the commands on methods, simulated federations, comparisons, datasets and finished runs."""
    app.root.add(demo.demo, "edge-fl demo", panel="Start")
    app.root.add(simulate.simulate, simulate.EXAMPLE, panel="Research")
    app.root.add(compare.compare, compare.EXAMPLE, panel="Research")
    for module in (runs, methods, lists, data):
        module.register(app)
