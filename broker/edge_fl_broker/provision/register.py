"""Register of issued and revoked certificates: one JSON file, changed under a lock and replaced atomically.

Devices may have numbered names: PREFIX000, PREFIX001, ... A number is used once: a removed device's history keeps its name.
"""

import fcntl
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import msgspec
from msgspec import Struct

from edge_fl.errors import ConfigError
from edge_fl.files import atomic
from edge_fl.files.paths import text
from edge_fl.untrusted import NOT_JSON, whole
from edge_fl.wire.identity import RENEW_AFTER
from edge_fl.wire.roles import PERSON_ROLES
from edge_fl.wire.topics import RESERVED, Role, role_of

MAX_ISSUED = 1_000_000
PERSONAL: frozenset[Role] = frozenset({"reader", *PERSON_ROLES})
NAMED = PERSONAL | {"claim", "worker"}
MAX_NUMBER = 10**31
WIDTH = 3  # digits, until a fleet's own names have more or fewer


class Issued(Struct, frozen=True, omit_defaults=True):
    """One certificate. A claim names its `device`, the SHA-256 of its secret, and that of the key for which it was redeemed.

    `tags` are those that the device was enrolled with.
    `issued_by` and `revoked_by` say who did it.
    """

    name: str
    serial: str
    begins: datetime
    expires: datetime
    revoked: datetime | None = None
    device: str = ""
    token: str = ""
    key: str = ""
    tags: dict[str, str] = {}
    issued_by: str = ""
    revoked_by: str = ""

    @property
    def role(self) -> Role:
        """The role that follows from the name."""
        return role_of(self.name)

    @property
    def person(self) -> bool:
        """Whether it was issued for a person's role, or as the second connection of the person `device`."""
        return self.role in PERSONAL and self.name not in RESERVED

    def holds(self, now: datetime) -> bool:
        """Whether a broker accepts it."""
        return self.revoked is None and now < self.expires

    def state(self, now: datetime) -> str:
        """One of the words valid, used, expired, revoked."""
        if self.revoked or now >= self.expires:
            return "revoked" if self.revoked else "expired"
        return "used" if self.key else "valid"


Rows = tuple[Issued, ...]


def denied(rows: Iterable[Issued], now: datetime) -> list[str]:
    """Names with a revoked certificate and no valid one; their messages are ignored."""
    rows = list(rows)
    holding = {row.name for row in rows if row.holds(now)}
    return sorted({row.name for row in rows if row.revoked and row.role != "claim"} - holding)


def named(rows: Iterable[Issued], now: datetime) -> list[str]:
    """Names that the access list must contain: claims (redeemed or not), workers and people that can connect."""
    return sorted(
        {row.name for row in rows if row.role in NAMED and row.name not in RESERVED and row.holds(now)}
    )


def renewals(rows: Iterable[Issued], now: datetime) -> dict[str, str]:
    """Serial number of each certificate in use -> what renews it, and from when on. One that a later one has replaced is not in use."""
    newest = {row.name: row for row in rows if row.holds(now)}
    return {row.serial: _renewal(row) for row in newest.values() if not row.key}


def _renewal(row: Issued) -> str:
    if row.role == "claim":
        return "none: its device redeems it once"
    if row.role == "worker" or (row.person and row.device != "operator"):
        return "by hand: edge-fl fleet rotate"
    due = row.begins + RENEW_AFTER * (row.expires - row.begins)
    return f"by {'the device' if row.role == 'device' else 'edge-fl broker up'} from {due:%Y-%m-%d}"


def next_end(rows: Iterable[Issued], now: datetime) -> datetime | None:
    """When the next certificate of a person expires."""
    return min((row.expires for row in rows if row.person and row.holds(now)), default=None)


class Register:
    """The register in a folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "register.json"
        self._lock = folder / "register.lock"

    def rows(self) -> Rows:
        """All certificates ever issued, in order. Raises ConfigError for an invalid file."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Rows)
        except FileNotFoundError:
            return ()
        except (OSError, *NOT_JSON) as error:
            raise ConfigError(f"{text(self.path)}: {error}; expected the register of certificates") from error

    @contextmanager
    def changing(self) -> Iterator[list[Issued]]:
        """The rows, to be changed in the block and written when it succeeds; locked against other processes."""
        try:
            with self._lock.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                before = self.rows()
                rows = list(before)
                yield rows
                if len(rows) > MAX_ISSUED:
                    raise ConfigError(f"{text(self.path)}: {len(rows)} certificates, at most {MAX_ISSUED}")
                if tuple(rows) != before:
                    atomic.write(self.path, msgspec.json.format(msgspec.json.encode(rows), indent=1))
        except OSError as error:
            raise ConfigError(f"{text(self.path)}: {error.strerror}; expected a writable folder") from error


def used_numbers(rows: Iterable[Issued], out: Path, names: Iterable[str], prefix: str) -> set[str]:
    """The digits of names with this prefix that were ever enrolled, have a folder in `out`, or are about to be enrolled."""
    folders = (folder.name for folder in out.iterdir()) if out.is_dir() else ()
    known = (name for row in rows for name in (row.name, row.device))
    return {name.removeprefix(prefix) for name in (*known, *folders, *names) if _is_numbered(name, prefix)}


def numbered_names(rows: Iterable[Issued], now: datetime, prefix: str) -> set[str]:
    """The numbered names with a valid certificate or claim."""
    held = (name for row in rows if row.holds(now) for name in (row.name, row.device))
    return {name for name in held if _is_numbered(name, prefix)}


def next_names(used: Collection[str], prefix: str, count: int) -> list[str]:
    """The next `count` names; they have as many digits as the highest one so far."""
    last = max(used, key=int, default="")
    first = int(last) + 1 if last else 0
    width = len(last) or max(WIDTH, len(str(count - 1)))
    return [f"{prefix}{number:0{width}d}" for number in range(first, first + count)]


def _is_numbered(name: str, prefix: str) -> bool:
    digits = name.removeprefix(prefix)
    return name.startswith(prefix) and whole(digits, MAX_NUMBER) is not None
