"""The MQTT broker: finds mosquitto, renders its configuration and runs it."""

import edge_fl  # noqa: F401  # before any dependency: it switches their telemetry off
