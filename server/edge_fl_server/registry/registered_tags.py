"""Tags of devices (key and value), and saved selectors ("groups"), by fleet."""

from collections.abc import Iterable, Mapping

from sqlalchemy import delete, select

from edge_fl_server.registry.database import Database
from edge_fl_server.registry.tables import groups, tags

Tags = Mapping[str, str]
"""Key -> value."""


def of_devices(
    db: Database, fleet: str, keys: Iterable[str] | None = None, devices: Iterable[str] | None = None
) -> dict[str, dict[str, str]]:
    """The tags of every device that has any; with `keys`, only these, and with `devices`, only theirs."""
    query = select(tags.c.device, tags.c.key, tags.c.value).where(tags.c.fleet == fleet, tags.c.value != "")
    if keys is not None:
        query = query.where(tags.c.key.in_(sorted(keys)))
    if devices is not None:
        query = query.where(tags.c.device.in_(sorted(devices)))
    found: dict[str, dict[str, str]] = {}
    for device, key, value in db.rows(query.order_by(tags.c.device, tags.c.key)):
        found.setdefault(device, {})[key] = value
    return found


def change(db: Database, fleet: str, names: Iterable[str], changes: Tags) -> None:
    """Set tags of these devices; an empty value removes one."""
    rows = [
        {"fleet": fleet, "device": name, "key": key, "value": value}
        for name in names
        for key, value in changes.items()
    ]
    db.put(tags, rows)


def enrolled(db: Database, fleet: str, given: Mapping[str, Tags]) -> None:
    """Add the tags that devices were enrolled with, by device; keys that were ever set stay as they are."""
    with db.writing() as connection:
        known = {
            tuple(row)
            for row in connection.execute(select(tags.c.device, tags.c.key).where(tags.c.fleet == fleet))
        }
        rows = [
            {"fleet": fleet, "device": device, "key": key, "value": value}
            for device, own in given.items()
            for key, value in own.items()
            if (device, key) not in known
        ]
        db.upsert(connection, tags, rows)


def saved_groups(db: Database, fleet: str) -> dict[str, str]:
    """The saved selectors by name, ascending."""
    query = select(groups.c.name, groups.c.selector).where(groups.c.fleet == fleet).order_by(groups.c.name)
    return db.pairs(query)


def save_group(db: Database, fleet: str, name: str, selector: str) -> None:
    """Save a selector under a name; replaces an earlier one."""
    db.put(groups, [{"fleet": fleet, "name": name, "selector": selector}])


def remove_group(db: Database, fleet: str, name: str) -> None:
    """Delete a saved selector."""
    db.change(delete(groups).where(groups.c.fleet == fleet, groups.c.name == name))
