"""Numbered names of devices: PREFIX000, PREFIX001, ... A number is used once: a removed device's history keeps its name."""

from collections.abc import Collection, Iterable
from datetime import datetime
from pathlib import Path

from edge_fl.untrusted import whole
from edge_fl_broker.provision.register import Issued

MAX_NUMBER = 10**31
WIDTH = 3  # digits, until a fleet's own names have more or fewer


def used(rows: Iterable[Issued], out: Path, names: Iterable[str], prefix: str) -> set[str]:
    """The digits of names with this prefix that were ever enrolled, have a folder in `out`, or are about to be enrolled."""
    folders = (folder.name for folder in out.iterdir()) if out.is_dir() else ()
    known = (name for row in rows for name in (row.name, row.device))
    return {name.removeprefix(prefix) for name in (*known, *folders, *names) if _is_numbered(name, prefix)}


def enrolled(rows: Iterable[Issued], now: datetime, prefix: str) -> set[str]:
    """The numbered names with a valid certificate or claim."""
    held = (name for row in rows if row.holds(now) for name in (row.name, row.device))
    return {name for name in held if _is_numbered(name, prefix)}


def following(used: Collection[str], prefix: str, count: int) -> list[str]:
    """The next `count` names; they have as many digits as the highest one so far."""
    last = max(used, key=int, default="")
    first = int(last) + 1 if last else 0
    width = len(last) or max(WIDTH, len(str(count - 1)))
    return [f"{prefix}{number:0{width}d}" for number in range(first, first + count)]


def _is_numbered(name: str, prefix: str) -> bool:
    digits = name.removeprefix(prefix)
    return name.startswith(prefix) and whole(digits, MAX_NUMBER) is not None
