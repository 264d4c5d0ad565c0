"""The device side: agent, personal head and data. Head-only devices need no torch."""

import edge_fl  # noqa: F401  # before any dependency: it switches their telemetry off
