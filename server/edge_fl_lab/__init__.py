"""For research: simulate, compare and tune methods, reproduce papers' tables, plot and report runs, fetch datasets; the Python API.

An extension of `edge_fl_server`, which never imports it. It adds commands through the entry points "edge_fl.commands", the engine
`ray`, viewers of training and the reports of runs through others (pyproject.toml lists them).
"""

import edge_fl  # noqa: F401  # before any dependency: it switches their telemetry off
