"""Personal tokens for the dashboard and `/metrics`: only the SHA-256 of a secret is stored, which suffices for 256 random bits."""

import hashlib
import secrets
import time
from collections.abc import Collection
from datetime import UTC, datetime

import msgspec
from sqlalchemy import select, update

from edge_fl.errors import InputError
from edge_fl.wire.roles import Person, PersonRole
from edge_fl_server.registry.database import Database, now
from edge_fl_server.registry.tables import TokenRecord, tokens

BEGINNING = "efl_"  # lets secret scanners recognise one
DAY_S = 86_400
USED_EVERY_S = 60  # the last use is stored at most this often


def state(token: TokenRecord, now_s: float | None = None) -> str:
    """One of the words valid, expired, revoked."""
    if token.revoked_at:
        return "revoked"
    return "valid" if (time.time() if now_s is None else now_s) < token.expires_s else "expired"


def create(db: Database, fleet: str, name: str, roles: Collection[PersonRole], days: float, by: str) -> str:
    """Create a token -> its secret, which is not stored. Raises InputError if the name has a valid one."""
    if (present := get(db, fleet, name)) and state(present) == "valid":
        raise InputError(
            f"{name}: has a valid token, expected a new name ('edge-fl token renew {name}' renews it)"
        )
    return _store(db, fleet, name, ",".join(sorted(set(roles))), days, by)


def renew(db: Database, fleet: str, name: str, days: float, by: str) -> str:
    """Replace the secret of a token, also of an expired one, with a new end -> the new secret. Raises InputError."""
    present = get(db, fleet, name)
    if present is None or present.revoked_at:
        raise InputError(
            f"{name}: {'was revoked' if present else 'has no token'}, expected one of 'edge-fl token list'"
        )
    return _store(db, fleet, name, present.roles, days, by)


def revoke(db: Database, fleet: str, name: str) -> None:
    """End a token. Raises InputError if there is none, or it was revoked."""
    ours = (tokens.c.fleet == fleet) & (tokens.c.name == name) & (tokens.c.revoked_at == "")
    if not db.change(update(tokens).where(ours).values(revoked_at=now())):
        raise InputError(f"{name}: has no token to revoke, expected one of 'edge-fl token list'")


def find(db: Database, fleet: str, secret: str) -> Person | None:
    """The person of a valid token; its use is stored."""
    if not secret.startswith(BEGINNING):
        return None
    query = select(tokens).where(tokens.c.fleet == fleet, tokens.c.sha256 == _digest(secret))
    token = db.one(query, TokenRecord)
    if token is None or state(token) != "valid":
        return None
    used = datetime.fromisoformat(token.used_at) if token.used_at else None
    if used is None or (datetime.now(UTC) - used).total_seconds() > USED_EVERY_S:
        same = (tokens.c.fleet == fleet) & (tokens.c.sha256 == token.sha256)
        db.change(update(tokens).where(same).values(used_at=now()))
    return Person(token.name, "token", msgspec.convert(token.roles.split(","), frozenset[PersonRole]))


def get(db: Database, fleet: str, name: str) -> TokenRecord | None:
    """One token."""
    return next((token for token in listed(db, fleet) if token.name == name), None)


def listed(db: Database, fleet: str) -> list[TokenRecord]:
    """All tokens of a fleet, by name."""
    return db.find(select(tokens).where(tokens.c.fleet == fleet).order_by(tokens.c.name), TokenRecord)


def _store(db: Database, fleet: str, name: str, roles: str, days: float, by: str) -> str:
    secret = BEGINNING + secrets.token_urlsafe(32)
    record = TokenRecord(fleet, name, roles, _digest(secret), int(time.time() + days * DAY_S), now(), by)
    db.put(tokens, [msgspec.to_builtins(record)])
    return secret


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
