"""The registry: what the server knows about devices, runs, rounds, tasks, reports, releases and roll-outs, in one database.

    db = Database.open("runs/server/registry.sqlite")    # or postgresql://user@host/name
    devices.known(db, "main"); runs.listed(db); rollouts.steer(db, 3, "paused")

SQLite in WAL mode by default, PostgreSQL by URL. Functions take and return plain frozen values (`records`); no row, session or table leaves
this package. Several processes may use one registry at a time: what another one wants (a roll-out paused, a run stopped, a device
revoked) is written as a desired state, and the running server applies it.
"""

from server.registry.database import Database

__all__ = ["Database"]
