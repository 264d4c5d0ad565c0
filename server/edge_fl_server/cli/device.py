"""`edge-fl device logs` and `edge-fl device diagnose`: the operator asks one device over the broker."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from edge_fl.cli import App
from edge_fl.console import units
from edge_fl.console.output import Format, print_status, show_table
from edge_fl.console.tables import Column, Columns
from edge_fl.files.paths import text
from edge_fl.options import (
    CONNECTION,
    FOLDERS,
    LOOPBACK,
    WAIT,
    BrokerAddressOptions,
    FormatOption,
    argument,
    option,
)
from edge_fl_server.cli.options import RegistryPlace, SinceOption, acting, registry

if TYPE_CHECKING:
    from edge_fl.wire.messages import Query
    from edge_fl_server.mqtt.devices.queries import QueryAnswer

DeviceArgument = Annotated[str, argument("DEVICE", "A device of 'edge-fl fleet list' that is connected.")]
WaitOption = Annotated[
    float,
    option("--wait SECONDS", f"{WAIT}, for the answer.", CONNECTION, min=1, max=600),
]
LINE_COLUMNS: Columns = {
    "at": Column("time, UTC", rank=1),
    "level": "level",
    "text": Column("text", prose=True),
}
CHECK_COLUMNS: Columns = {
    "check": "check",
    "state": "state",
    "found": Column("found", prose=True),
    "remedy": Column("remedy", prose=True),
}


def register(app: App) -> None:
    """Add the server's part of the group `device`."""
    group = app.group("device")
    group.add(logs, "edge-fl device logs pi-07 --level warning --since 2h")
    group.add(diagnose, "edge-fl device diagnose pi-07 --out pi-07.zip")


def logs(
    device: DeviceArgument,
    level: Annotated[
        Literal["info", "warning", "error"],
        option("--level LEVEL", "Lowest level to show: info, warning or error."),
    ] = "info",
    since: SinceOption = "",
    until: Annotated[
        str, option("--until TIME", "Up to this time: a day or time in UTC, or an age, such as 1h.")
    ] = "",
    wait: WaitOption = 20.0,
    *,
    broker: BrokerAddressOptions,
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show the newest lines of a device's log, which it keeps in 256 KiB and sends on request; the times are those of its clock."""
    from msgspec.structs import asdict

    from edge_fl.errors import InputError
    from edge_fl.wire.messages import Logs, Query
    from edge_fl_server.mqtt.device_packets import one_line

    since_s, until_s = _age_s(since, "--since"), _age_s(until, "--until")
    if since and until_s >= since_s:
        raise InputError(f"--until {until} is not after --since {since}: expected a later time")
    query = Query("none", "logs", level, since_s, until_s)
    answer = _ask(device, query, wait, broker, place)
    assert isinstance(answer.content, Logs)
    rows = [{**asdict(line), "text": one_line(line.text)} for line in answer.content.lines]
    if format is Format.TABLE:
        rows = [{**row, "at": one_line(row["at"][:19].replace("T", " "))} for row in rows]
    show_table(rows, LINE_COLUMNS, format)
    count = "no line" if not rows else "1 line" if len(rows) == 1 else f"{len(rows)} lines"
    if older := answer.content.left_out:
        count += f", {older} older ones did not fit (--since, --level or --until select fewer)"
    print_status(f"{device}: {count}; {_origin(answer)}")


def _age_s(moment: str, option: str) -> float:
    """The age of a moment in seconds: a device knows the ages of its lines better than the time of day. 0 for ""."""
    return (
        max((datetime.now(UTC) - units.parse_moment(moment, option)).total_seconds(), 0.0) if moment else 0.0
    )


def diagnose(
    device: DeviceArgument,
    out: Annotated[
        Path | None,
        option(
            "--out FOLDER",
            "Folder to write to, or .zip file; a new one [diagnostics-DEVICE-TIME].",
            FOLDERS,
        ),
    ] = None,
    wait: WaitOption = 120.0,
    *,
    broker: BrokerAddressOptions,
    place: RegistryPlace,
) -> None:
    """Get a diagnostics bundle from a device: checks, versions, recent errors and settings without secrets, signed by the device."""
    from msgspec.structs import asdict

    from edge_fl.wire.messages import Diagnostics, Query
    from edge_fl_server.mqtt.device_packets import one_line
    from edge_fl_server.mqtt.devices import queries

    queries.require_new(out)
    answer = _ask(device, Query("none", "diagnostics"), wait, broker, place)
    found = answer.content
    assert isinstance(found, Diagnostics)
    where = queries.write_bundle(answer, place.fleet, out)
    show_table(
        [{key: one_line(text) for key, text in asdict(check).items()} for check in found.checks],
        CHECK_COLUMNS,
        Format.TABLE,
    )
    errors = f"{len(found.errors)} recent warnings and errors"
    agent = one_line(found.versions.get("edge-fl", "of unknown version"))
    why = f" ({one_line(found.why)})" if found.why else ""
    print_status(
        f"{device}: {found.status}, {found.activity}{why}; agent {agent}, {errors}; {_origin(answer)}"
    )
    print(text(where))


def _ask(
    device: str, query: Query, wait: float, broker: BrokerAddressOptions, place: RegistryPlace
) -> QueryAnswer:
    """Ask a device, unless the registry knows that it was revoked. Raises ConnectError then, and the errors of `queries.ask`."""
    from contextlib import ExitStack

    from edge_fl.errors import ConnectError
    from edge_fl_server.mqtt.connector import fleet_authorities, operator_connector, sole_user
    from edge_fl_server.mqtt.devices import queries
    from edge_fl_server.registry import registered_devices

    identity, fleet = broker.identity, place.fleet
    connect = operator_connector(broker.host or LOOPBACK, broker.port or 0, identity)
    authorities = fleet_authorities(identity)
    known: list[str] = []
    with ExitStack() as stack:
        if place.exists:
            db = stack.enter_context(registry(place))
            record = registered_devices.get(db, fleet, device)
            if record and record.revoked:
                raise ConnectError(f"{device}: {record.blocked_why}", "it was not asked")
            known = registered_devices.names(db, fleet)
            stack.enter_context(acting(db, fleet, "diagnose", f"{device}, {query.what}", identity))
        stack.enter_context(sole_user(identity, wait, print_status))
        return queries.ask(
            connect, fleet, device, query, authorities, deadline_s=wait, notify=print_status, known=known
        )


def _origin(answer: QueryAnswer) -> str:
    if answer.signed:
        return f"signed with the certificate of {answer.device}"
    return "not signed: without certificates anyone on the broker could have written it"
