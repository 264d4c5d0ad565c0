"""The fleets of a registry: the id of the registry for each, and which server serves it, and since when.

Another registry of the same fleet has another id. The server that holds the fleet's lease writes its presence, everyone reads it.
"""

import secrets
from datetime import UTC, datetime

from msgspec import Struct
from sqlalchemy import select, update

from edge_fl.errors import InputError, nearest
from edge_fl_server.registry.database import Database
from edge_fl_server.registry.tables import fleets, servers

BEAT_S = 5.0  # between two signs of life
SILENT_S = 20.0  # a server without a sign of life for this long is offline


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


class Presence(Struct, frozen=True):
    """Whether a server is online, and since when it is or is not (ISO time; "" if there was none yet)."""

    online: bool = False
    since: str = ""


def begin(db: Database, fleet: str, sequence: int) -> None:
    """Note that a server is online from now on, in place of any earlier one."""
    row = {"fleet": fleet, "sequence": sequence, "online": True}
    with db.writing() as connection:
        at = connection.execute(select(db.clock)).scalar_one()
        db.upsert(connection, servers, [row | {"since_s": at, "beat_s": at}])


def beat(db: Database, fleet: str, sequence: int) -> None:
    """Give a sign of life; nothing happens if another server has taken over."""
    _change(db, fleet, sequence, beat_s=db.clock)


def end(db: Database, fleet: str, sequence: int) -> None:
    """Note that a server is offline from now on, unless another one has taken over."""
    _change(db, fleet, sequence, online=False, since_s=db.clock)


def presence(db: Database, fleet: str) -> Presence:
    """Whether a server is online. One that ended without notice is offline since its last sign of life."""
    query = select(servers.c.online, servers.c.since_s, servers.c.beat_s, db.clock)
    if not (rows := db.rows(query.where(servers.c.fleet == fleet))):
        return Presence()
    online, since_s, beat_s, now_s = rows[0]
    if online and now_s - beat_s > SILENT_S:
        online, since_s = False, beat_s
    return Presence(online, datetime.fromtimestamp(since_s, UTC).isoformat())


def _change(db: Database, fleet: str, sequence: int, **changes: object) -> None:
    mine = (servers.c.fleet == fleet) & (servers.c.sequence == sequence)
    db.change(update(servers).where(mine).values(**changes))
