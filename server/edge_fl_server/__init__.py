"""The server: rounds, fleets, evaluation, releases and what it shows of them."""

import edge_fl  # noqa: F401  # before any dependency: it switches their telemetry off
