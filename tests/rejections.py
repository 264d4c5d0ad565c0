"""The rejected reports that a registry has kept."""

from sqlalchemy import select

from edge_fl_server.registry import Database
from edge_fl_server.registry.tables import RejectionRecord, rejections


def rejections_of(db: Database, fleet: str, *, device: str = "") -> list[RejectionRecord]:
    """Of a fleet or of one device, newest first."""
    query = select(rejections).where(rejections.c.fleet == fleet).order_by(rejections.c.number.desc())
    return db.find(query.where(rejections.c.device == device) if device else query, RejectionRecord)
