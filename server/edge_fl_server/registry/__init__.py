"""The registry: devices, runs, rounds, requests, reports, releases and roll-outs of all fleets, in one database.

    db = Database.open("runs/server/registry.sqlite")    # or postgresql://user@host/name
    devices.listed(db, "main"); runs.listed(db); rollouts.steer(db, 3, "paused")

SQLite in WAL mode by default, PostgreSQL by URL. Functions take and return frozen values (`records`); rows, sessions and tables stay inside
this package. Several processes may use one registry at a time: another process changes a desired state (pause a roll-out, stop a run,
end a quarantine), and the running server applies it.
"""

from edge_fl_server.registry.database import Database

__all__ = ["Database"]
