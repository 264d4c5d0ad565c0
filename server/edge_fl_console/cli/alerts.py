"""`edge-fl fleet alerts list | silence | test`: what needs attention, and where it is sent."""

import time
from datetime import UTC, datetime
from typing import Annotated

from edge_fl.cli import App, Commands
from edge_fl.console import units
from edge_fl.console.output import Format, print_status, show_table
from edge_fl.console.tables import Column, Columns
from edge_fl.errors import ConfigError, ConnectError, InputError, nearest
from edge_fl.files import paths
from edge_fl.options import FormatOption, argument, option
from edge_fl_server.cli.options import RegistryPlace, acting, registry

COLUMNS: Columns = {
    "rule": "rule",
    "subject": "about",
    "state": "state",
    "since": Column("since, UTC", rank=1),
    "sent": Column("sent on", rank=2),
    "text": Column("what", prose=True),
}


def register(app: App) -> None:
    """Add the group `fleet alerts`."""
    group = Commands(
        add_completion=False, help="Alerts about the fleet; channels and rules are in HOME/FLEET/alerts.toml."
    )
    app.group("fleet").add_typer(group, name="alerts")
    group.add(list_alerts, "edge-fl fleet alerts list --resolved 7d", name="list")
    group.add(silence, "edge-fl fleet alerts silence pi-07 --for 2h")
    group.add(test, "edge-fl fleet alerts test")


def list_alerts(
    resolved: Annotated[
        str, option("--resolved DURATION", "Also alerts resolved in this time, such as 30min, 2h or 7d.")
    ] = "0min",
    *,
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the alerts whose condition holds, newest first, and the channels on which they were sent."""
    from edge_fl_console.alerts import stored

    now_s = int(time.time())
    since_s = now_s - int(units.parse_duration(resolved, "--resolved"))
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
    show_table(rows, COLUMNS, format)


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
    from edge_fl_console.alerts.settings import load, path_of
    from edge_fl_server.registry import devices

    until_s = int(time.time()) + int(units.parse_duration(duration, "--for"))
    with registry(place) as db:
        known = {
            *load(path_of(place.home, place.fleet), db, place.fleet).rules,
            *devices.names(db, place.fleet),
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
    from edge_fl_console.alerts.channels import Channel
    from edge_fl_console.alerts.settings import load, path_of

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
