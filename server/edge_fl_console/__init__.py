"""For operators: the dashboard and its logins, Prometheus metrics, alerts, and answers for an assistant.

An extension of `edge_fl_server`, which never imports it. It adds commands through the entry points "edge_fl.commands" and runs the
dashboard and the alerts next to `server run` and `server up` through "edge_fl.services". It reads the registry and acts through it.
"""

import edge_fl  # noqa: F401  # before any dependency: it switches their telemetry off
