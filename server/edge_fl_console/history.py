"""Enters the figures of a fleet into its history, next to a running server: devices online, and the means that the pages show."""

from sqlalchemy import case, func, select

from edge_fl_console import accuracy
from edge_fl_console.accuracy import HeadReports
from edge_fl_server.mqtt.devices.roster import AVAILABLE
from edge_fl_server.registry import Database, history, rollouts
from edge_fl_server.registry.history import HOUR_S, STEP_S
from edge_fl_server.registry.registered_devices import of_fleet
from edge_fl_server.registry.tables import HistoryRecord, devices


def of_now(db: Database, fleet: str, now_s: int) -> HistoryRecord:
    """The figures at present."""
    connected = devices.c.status.in_(AVAILABLE)
    counts = select(func.count(), func.count(case((connected, 1)))).where(of_fleet(fleet))
    ((known, online),) = db.rows(counts)
    served = rollouts.served_release(db, fleet)
    heads = accuracy.head_reports(db, fleet).get(served, HeadReports())
    full, full_n = accuracy.full_devices(db, fleet)
    of_fleets = (heads.fleet, heads.fleet_measured)
    return HistoryRecord(
        fleet, now_s, known, online, served, heads.after, heads.measured, *of_fleets, full, full_n
    )


class HistoryRecorder:
    """Records the history of one fleet."""

    def __init__(self, db: Database, fleet: str) -> None:
        self._db, self._fleet = db, fleet
        self._recorded_s = self._thinned_s = 0

    def look(self, now_s: int) -> None:
        """Add the figures of now once in STEP_S, and thin out old ones once an hour. Raises RunError when the registry fails."""
        if now_s // STEP_S == self._recorded_s // STEP_S:
            return
        self._recorded_s = now_s
        history.record(self._db, of_now(self._db, self._fleet, now_s))
        if now_s - self._thinned_s >= HOUR_S:
            self._thinned_s = now_s
            history.thin(self._db, self._fleet, now_s)
