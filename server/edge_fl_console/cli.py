"""The operator's commands: `server dashboard` and `server mcp`, the groups `token` and `fleet alerts`, `fleet changes` and
`fleet audit`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edge_fl import signals
from edge_fl.cli import App, Commands
from edge_fl.console import units
from edge_fl.console.output import Format, print_status, show_table
from edge_fl.console.tables import Column, Columns
from edge_fl.errors import ConfigError, ConnectError, InputError, nearest
from edge_fl.files import paths
from edge_fl.options import CONNECTION, LOOPBACK, CertOption, FormatOption, KeyOption, argument, option
from edge_fl.wire.roles import PERSON_DAYS, PERSON_ROLES
from edge_fl_server.cli.options import RegistryPlace, SinceOption, acting, registry, since_text

if TYPE_CHECKING:
    from edge_fl_server.registry import Database

ListenOption = Annotated[
    str, option("--listen HOST", "Address to listen on; all but loopback require a login.", CONNECTION)
]
Port = Annotated[
    int, option("--port N", "Port to listen on; 0 selects a free one.", CONNECTION, min=0, max=65535)
]
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
ALERTS: Columns = {
    "rule": "rule",
    "subject": "about",
    "state": "state",
    "since": Column("since, UTC", rank=1),
    "sent": Column("sent on", rank=2),
    "text": Column("what", prose=True),
}


def register(app: App) -> None:
    """Add the commands to the groups `server` and `fleet`, and the groups `token` and `fleet alerts`."""
    server, fleet = app.group("server"), app.group("fleet")
    server.add(dashboard, "edge-fl server dashboard --port 8080")
    server.add(mcp, "edge-fl server mcp")
    tokens = app.group("token", "Personal tokens for the dashboard: create, list, renew, revoke.", "Fleet")
    tokens.add(create, "edge-fl token create ann --role viewer")
    tokens.add(list_tokens, "edge-fl token list", name="list")
    tokens.add(renew, "edge-fl token renew ann")
    tokens.add(revoke, "edge-fl token revoke ann")
    fleet.add(changes, "edge-fl fleet changes --since yesterday")
    fleet.add(audit, "edge-fl fleet audit --since 2026-11-01 --who ann")
    alerts = Commands(
        add_completion=False, help="Alerts about the fleet; channels and rules are in HOME/FLEET/alerts.toml."
    )
    fleet.add_typer(alerts, name="alerts")
    alerts.add(list_alerts, "edge-fl fleet alerts list --since 7d", name="list")
    alerts.add(silence, "edge-fl fleet alerts silence pi-07 --for 2h")
    alerts.add(test, "edge-fl fleet alerts test")


def dashboard(
    host: ListenOption = LOOPBACK,
    port: Port = 8080,
    cert: CertOption = None,
    key: KeyOption = None,
    login: Annotated[
        bool, option("--login", "Require a token on loopback too, for example behind a proxy.")
    ] = False,
    oidc: Annotated[
        Path | None,
        option("--oidc FILE", "Single sign-on with OpenID Connect: a TOML file (docs/people.md)."),
    ] = None,
    *,
    place: RegistryPlace,
) -> None:
    """Show the fleet, its runs, releases and data in a browser; also serves /metrics for Prometheus.

    On addresses other than loopback a login is required: a personal token (edge-fl token create), or the shared one in
    EDGE_FL_DASHBOARD_TOKEN; if there is neither, a shared one is generated and printed.
    """
    from edge_fl_console.dashboard.serve import DashboardSettings, serve

    token = os.environ.get("EDGE_FL_DASHBOARD_TOKEN", "")
    settings = DashboardSettings(
        place.location, place.fleet, place.home, host, port, token, cert, key, login, oidc
    )
    with signals.serving(print_status):
        serve(settings, print_status)


def mcp(
    place: RegistryPlace,
) -> None:
    """Answer an assistant's questions about the fleet (Model Context Protocol, standard input and output); read-only."""
    from edge_fl_console import assistant
    from edge_fl_console.alerts import rules
    from edge_fl_server.registry import Database, fleets

    with signals.serving(print_status), closing(Database.existing(place.location)) as db:
        fleets.require(db, place.fleet)
        settings = rules.load(rules.path_of(place.home, place.fleet), db, place.fleet)
        assistant.server(db, place.fleet, settings).run()


def create(
    name: NameArgument,
    role: Annotated[list[str], option("--role ROLE", "Role: viewer, operator or releaser; may be repeated.")],
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


def changes(
    since: SinceOption = "yesterday",
    *,
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """List what changed in the fleet, newest first: runs, releases, roll-outs, rejections and failures as in the dashboard's Log, alerts,
    new devices, and what people did.
    """
    from edge_fl_console import changes as changed
    from edge_fl_console.dashboard import standing

    start = units.parse_moment(since, "--since")
    with registry(place) as db:
        found = changed.since(db, place.fleet, start)
        states = standing.by_status(db, place.fleet)
    show_table(found.rows, changed.COLUMNS, format)
    now = ", ".join(f"{count:,} {status}" for status, count in states.items()) or "no device"
    first = found.complete
    print_status(f"{units.counted(len(found.rows), 'change')} since {first:%Y-%m-%d %H:%M} UTC; now {now}")
    if first > start:
        print_status("earlier ones are too many for this list: the dashboard's Log shows any day")


def audit(
    since: SinceOption = "",
    who: Annotated[str, option("--who NAME", "Only what this person did.")] = "",
    *,
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """List what people did, newest first: who, known by what (certificate, token, sign-on, local user), on what, when, result."""
    from edge_fl_server.registry import audit

    start = since_text(since)
    with registry(place) as db:
        found = audit.listed(db, place.fleet, since=start, who=who)
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


def list_alerts(
    since: SinceOption = "",
    *,
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the alerts whose condition holds, newest first, and the channels on which they were sent; with --since also those that were
    resolved since then.
    """
    from edge_fl_console.alerts import stored

    now_s = int(time.time())
    since_s = int(units.parse_moment(since, "--since").timestamp()) if since else now_s
    with registry(place) as db:
        quiet, sent = stored.silenced(db, place.fleet, now_s), stored.delivered(db, place.fleet)
        rows = []
        for alert in stored.listed(db, place.fleet, since_s):
            until_s = max(quiet.get(alert.rule, 0), quiet.get(alert.subject, 0))
            state = (
                "resolved" if alert.resolved_s else f"silent until {_time(until_s)}" if until_s else "active"
            )
            rows.append(
                {
                    "rule": alert.rule,
                    "subject": alert.subject,
                    "state": state,
                    "since": _time(alert.resolved_s or alert.raised_s),
                    "sent": ", ".join(sent.get(alert.number, [])),
                    "text": alert.text,
                }
            )
    show_table(rows, ALERTS, format)


def silence(
    name: Annotated[
        str, argument("NAME", "A rule, or a device or other subject, as 'fleet alerts list' shows it.")
    ],
    duration: Annotated[
        str, option("--for DURATION", "For how long, such as 30min, 2h or 7d; 0min ends a silence.")
    ] = "2h",
    *,
    place: RegistryPlace,
) -> None:
    """Send no alert of a rule, or about a device, for some time. Those whose condition still holds then are sent at its end."""
    from edge_fl_console.alerts import stored
    from edge_fl_console.alerts.rules import load, path_of
    from edge_fl_server.registry import registered_devices

    until_s = int(time.time()) + int(units.parse_duration(duration, "--for"))
    with registry(place) as db:
        known = {
            *load(path_of(place.home, place.fleet), db, place.fleet).rules,
            *registered_devices.names(db, place.fleet),
            "server",
        }
        known |= {alert.subject for alert in stored.active(db, place.fleet)}
        if name not in known:
            raise InputError(
                f"{name!r}: no rule and no device of fleet {place.fleet!r}{nearest(name, known)}"
            )
        with acting(db, place.fleet, "silence", f"{name}, for {duration}"):
            stored.silence(db, place.fleet, name, until_s)
    print_status(
        f"{name}: silent until {_time(until_s)} UTC" if until_s > time.time() else f"{name}: no longer silent"
    )


def test(
    channel: Annotated[str, argument("CHANNEL", "A channel of alerts.toml [all].")] = "",
    *,
    place: RegistryPlace,
) -> None:
    """Check alerts.toml and send a test message on each channel; prints the channels that accepted it."""
    from edge_fl_console.alerts.rules import load, path_of
    from edge_fl_console.alerts.watcher import Channel

    path, failed = path_of(place.home, place.fleet), []
    with registry(place) as db:
        settings = load(path, db, place.fleet)
    if channel and channel not in settings.channels:
        raise ConfigError(f"{paths.text(path)}: no channel {channel!r}{nearest(channel, settings.channels)}")
    if not settings.channels:
        raise ConfigError(
            f'{paths.text(path)}: no channels, expected some, such as ops = "mailto://..." (docs/alerts.md)'
        )
    for name, url in settings.channels.items():
        if channel in ("", name):
            try:
                Channel.open(name, url).send(
                    f"Fleet {place.fleet}: test", "This is a test of the channel.", good=True
                )
                print(name)
            except ConnectError as error:
                print_status(error.message)
                failed.append(name)
    if failed:
        raise ConnectError(f"{', '.join(failed)}: the test message was not accepted")


def _time(at_s: int) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M}"
