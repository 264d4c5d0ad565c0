"""The fleets of a registry, and the id of the registry for each: another registry of the same fleet has another id."""

import secrets

from sqlalchemy import select

from edge_fl.errors import InputError, nearest
from edge_fl_server.registry.database import Database
from edge_fl_server.registry.tables import fleets


def known(db: Database) -> list[str]:
    """The fleets that ever existed in this registry, ascending."""
    return sorted(row.fleet for row in db.rows(select(fleets.c.fleet)))


def require(db: Database, fleet: str) -> None:
    """Raise InputError for a fleet that never existed in a registry of others; its server creates it."""
    if (names := known(db)) and fleet not in names:
        hint = nearest(fleet, names)
        raise InputError(
            f"no fleet {fleet!r} in this registry{hint}; 'edge-fl server up --fleet {fleet}' creates it"
        )


def id_of(db: Database, fleet: str) -> str:
    """The id of this registry for a fleet; "" before its first server."""
    return next((row.id for row in db.rows(select(fleets).where(fleets.c.fleet == fleet))), "")


def claim(db: Database, fleet: str) -> str:
    """The id of this registry for a fleet, drawn if there is none."""
    with db.writing() as connection:
        db.insert_new(connection, fleets, {"fleet": fleet, "id": secrets.token_hex(8)})
    return id_of(db, fleet)
