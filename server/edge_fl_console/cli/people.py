"""`edge-fl token create | list | renew | revoke` and `edge-fl fleet audit`: who may use the dashboard, and what people did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from edge_fl.cli import App
from edge_fl.console.output import Format, print_status, show_table
from edge_fl.console.tables import Column, Columns
from edge_fl.errors import InputError
from edge_fl.options import FormatOption, argument, option
from edge_fl.wire.roles import PERSON_DAYS, PERSON_ROLES
from edge_fl_server.cli.options import RegistryPlace, acting, registry

if TYPE_CHECKING:
    from edge_fl_server.registry import Database

NameArgument = Annotated[str, argument("NAME", "Name of the person or program.")]
DaysOption = Annotated[int, option("--days N", "Validity in days.", min=1, max=3650)]
TOKENS: Columns = {
    "name": "name",
    "roles": "roles",
    "state": "state",
    "expires": "expires",
    "used": "last used, UTC",
    "created": Column("created", rank=1),
    "by": Column("created by", rank=1),
}
AUDIT: Columns = {
    "at": "time, UTC",
    "who": "who",
    "known_by": "known by",
    "action": "action",
    "target": "on",
    "result": Column("result", prose=True),
}


def register(app: App) -> None:
    """Add the group `token`, and `fleet audit`."""
    group = app.group("token", "Personal tokens for the dashboard: create, list, renew, revoke.", "Fleet")
    group.add(create, "edge-fl token create ann --role viewer")
    group.add(list_tokens, "edge-fl token list", name="list")
    group.add(renew, "edge-fl token renew ann")
    group.add(revoke, "edge-fl token revoke ann")
    app.group("fleet").add(audit, "edge-fl fleet audit --since 2026-11-01 --who ann")


def create(
    name: NameArgument,
    role: Annotated[list[str], option("--role ROLE", "viewer, operator or releaser; may be repeated.")],
    days: DaysOption = PERSON_DAYS,
    *,
    place: RegistryPlace,
) -> None:
    """Create a personal token and print it; the registry keeps only its hash, so it cannot be shown again."""
    from edge_fl_console import tokens

    roles = [known for known in PERSON_ROLES if known in role]
    if unknown := [each for each in role if each not in PERSON_ROLES]:
        raise InputError(f"--role {unknown[0]}: expected {', '.join(PERSON_ROLES)}")
    from edge_fl.fields import EXPECTED_NAME
    from edge_fl.wire.topics import NAME

    if not NAME.match(name):
        raise InputError(f"{name[:100]!r}: {EXPECTED_NAME}")
    with _acting("token create", f"{name}: {', '.join(roles)}", place) as (db, by):
        secret = tokens.create(db, place.fleet, name, roles, days, by)
    print(secret)
    print_status(f"{name}: {', '.join(roles)} for {days} days; sign in with it at the dashboard's address")


def list_tokens(
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the personal tokens: roles, state, expiry, last use."""
    from datetime import UTC, datetime

    from edge_fl_console import tokens

    with registry(place) as db:
        rows = [
            {
                "name": token.name,
                "roles": token.roles.replace(",", ", "),
                "state": tokens.state(token),
                "expires": f"{datetime.fromtimestamp(token.expires_s, UTC):%Y-%m-%d}",
                "used": token.used_at[:16].replace("T", " ") or None,
                "created": token.created_at[:10],
                "by": token.created_by,
            }
            for token in tokens.listed(db, place.fleet)
        ]
    show_table(rows, TOKENS, format)


def renew(
    name: NameArgument,
    days: DaysOption = PERSON_DAYS,
    *,
    place: RegistryPlace,
) -> None:
    """Replace a token, also an expired one, by a new one with the same name and roles; prints it."""
    from edge_fl_console import tokens

    with _acting("token renew", name, place) as (db, by):
        secret = tokens.renew(db, place.fleet, name, days, by)
    print(secret)


def revoke(
    name: NameArgument,
    place: RegistryPlace,
) -> None:
    """End a token at once, also in open pages."""
    from edge_fl_console import tokens

    with _acting("token revoke", name, place) as (db, _):
        tokens.revoke(db, place.fleet, name)
    print_status(f"{name}: revoked")


def audit(
    since: Annotated[
        str, option("--since TIME", "Only from this day or time on, UTC, such as 2026-11-23.")
    ] = "",
    who: Annotated[str, option("--who NAME", "Only what this person did.")] = "",
    *,
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """List what people did, newest first: who, known by what (certificate, token, sign-on, local user), on what, when, result."""
    from datetime import UTC, datetime

    from edge_fl_server.registry import audit

    try:
        start = datetime.fromisoformat(since) if since else None
    except ValueError as error:
        raise InputError(
            f"--since {since}: expected a date or time, such as 2026-11-23 or 2026-11-23T14:00"
        ) from error
    if start:
        start = (start if start.tzinfo else start.replace(tzinfo=UTC)).astimezone(UTC)
    with registry(place) as db:
        found = audit.listed(
            db, place.fleet, since=start.isoformat(timespec="milliseconds") if start else "", who=who
        )
    rows = [
        {name: getattr(row, name) for name in AUDIT} | {"at": row.at[:19].replace("T", " ")} for row in found
    ]
    show_table(rows, AUDIT, format)
    if len(found) == audit.MAX_SHOWN:
        print_status(f"the newest {audit.MAX_SHOWN:,}; earlier ones: --since, --who")


@contextmanager
def _acting(action: str, target: str, place: RegistryPlace) -> Iterator[tuple[Database, str]]:
    """The registry, and who acts; the audit log has it."""
    with registry(place) as db, acting(db, place.fleet, action, target) as person:
        yield db, person.name
