"""Which server serves a fleet, and since when: written by the server that holds the fleet's lease, read by everyone."""

from datetime import UTC, datetime

from msgspec import Struct
from sqlalchemy import select, update

from edge_fl_server.registry.database import Database
from edge_fl_server.registry.tables import servers

BEAT_S = 5.0  # between two signs of life
SILENT_S = 20.0  # a server without a sign of life for this long is offline


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
