"""Select devices of a fleet from the registry; only the tags and attributes that the selector compares are read."""

import logging
import threading
import time
from typing import Any

from sqlalchemy import ColumnElement, select

from edge_fl.errors import EdgeFLError, shortened, similar
from edge_fl_server.registry import Database, tags
from edge_fl_server.registry import devices as registered
from edge_fl_server.registry.devices import STANDING, of_fleet
from edge_fl_server.registry.tables import devices
from edge_fl_server.selectors.expression import Selector, Value, parse

log = logging.getLogger(__name__)

REFRESH_S = 5.0
_ABLE = devices.c.capability
ATTRIBUTES: dict[str, ColumnElement[Any]] = {
    "name": devices.c.device,
    "status": devices.c.status,
    "standing": STANDING,
    "activity": devices.c.activity,
    "why": devices.c.why,
    "tier": _ABLE["tier"].as_string(),
    "head": _ABLE["head"].as_string(),
    "arch": _ABLE["machine"].as_string(),
    "python": _ABLE["python"].as_string(),
    "onnxruntime": _ABLE["onnxruntime"].as_string(),
    "agent": _ABLE["agent"].as_string(),
    "release": devices.c.release,
    "samples": _ABLE["samples"].as_integer(),
    "memory_mb": _ABLE["memory_mb"].as_integer(),
    "disk_free_mb": _ABLE["disk_free_mb"].as_integer(),
    "drift": _ABLE["drift"].as_float(),
}
"""Attribute -> its column in the registry."""


def parsed(db: Database, fleet: str, text: str) -> Selector:
    """Parse a selector with the fleet's groups. Raises SelectorError."""
    return parse(text, tags.saved_groups(db, fleet))


def selected(db: Database, fleet: str, selector: Selector | str) -> list[str]:
    """The names of the devices that a selector matches, ascending. Raises SelectorError."""
    if isinstance(selector, str):
        selector = parsed(db, fleet, selector)
    names = sorted(selector.keys & ATTRIBUTES.keys() | {"name"})
    query = select(*(ATTRIBUTES[name].label(name) for name in names)).where(of_fleet(fleet))
    keys = selector.keys - ATTRIBUTES.keys()
    tagged = tags.of_devices(db, fleet, keys) if keys else {}
    matching = []
    for row in db.rows(query.order_by(devices.c.device)):
        values = {name: value for name, value in zip(names, row, strict=True) if value not in (None, "")}
        device: dict[str, Value] = {**values, **tagged.get(values["name"], {})}
        if selector.matches(device):
            matching.append(values["name"])
    return matching


def unknown_tags(db: Database, fleet: str, selector: Selector) -> str:
    """Format a hint for the keys of a selector that no device of the fleet has; empty if there are none."""
    tagged = tags.of_devices(db, fleet)
    known = sorted({key for name in registered.names(db, fleet) for key in tagged.get(name, {})})
    missing = sorted(selector.keys - {*known, *ATTRIBUTES})
    lists = f" (tags: {shortened(known) or 'none'}; attributes: {', '.join(ATTRIBUTES)})"
    return "".join(
        f"; no device has the tag {key!r}{similar(key, [*known, *ATTRIBUTES]) or lists}" for key in missing
    )


class Selection:
    """The devices that a selector matches at present, read again after REFRESH_S; all devices for an empty selector.

    `device in selection` is safe from any thread. While the registry fails, or the selector names a removed group, the devices that it
    matched last stay selected.
    """

    def __init__(self, db: Database, fleet: str, text: str) -> None:
        self._db, self._fleet, self.text = db, fleet, text
        self._lock = threading.Lock()
        self._names: frozenset[str] = frozenset()
        self._until_s = 0.0

    def __contains__(self, device: str) -> bool:
        if not self.text:
            return True
        with self._lock:
            if time.monotonic() > self._until_s:
                self._until_s = time.monotonic() + REFRESH_S
                try:
                    self._names = frozenset(selected(self._db, self._fleet, self.text))
                except EdgeFLError as error:
                    log.warning("%s; %d devices stay selected", error.message, len(self._names))
            return device in self._names


def require(db: Database, fleet: str, *texts: str) -> None:
    """Check selectors before something depends on them; empty ones are skipped. Raises SelectorError."""
    for text in filter(None, texts):
        parsed(db, fleet, text)
