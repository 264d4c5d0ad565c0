"""`edge-fl fleet list | traffic | admit | tag | group | set | settings | rename | decommission`: the devices of a fleet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from edge_fl.cli import App, Commands
from edge_fl.console import units
from edge_fl.console.output import Format, confirm, print_status, show_table
from edge_fl.console.tables import Column, Columns
from edge_fl.console.units import counted
from edge_fl.errors import InputError, RunError, nearest
from edge_fl.files.paths import text
from edge_fl.options import (
    IDENTITIES,
    BrokerAddressOptions,
    FormatOption,
    IdentitiesOption,
    YesOption,
    argument,
    option,
)
from edge_fl_server.cli.options import (
    RegistryPlace,
    SinceOption,
    WhereOption,
    acting,
    confirmed,
    connect_to,
    registry,
    since_text,
)

if TYPE_CHECKING:
    from edge_fl_server.registry import Database
    from edge_fl_server.registry.tables import DeviceRecord

SelectorArgument = Annotated[
    str, argument("SELECTOR", "A device's name, or a selector such as 'site=berlin and tier=full'.")
]
CHILD_S = 120.0
ANSWER_S, POLL_S = 20.0, 0.2
"""How long `fleet set` waits for the devices that are online: an agent applies settings by starting again, in about a second."""
SERVER_CLEARS = "a running server clears its retained messages within a second, otherwise the next one does when it starts"
GroupArgument = Annotated[str, argument("GROUP", "Name of the group: a-z, 0-9 and '-'.")]
TRAFFIC: Columns = {
    "device": "device",
    "reports": "reports",
    "up": Column("sent", units.size),
    "down": Column("received", units.size),
}
COLUMNS: Columns = {"group": "group", "selector": "selector", "devices": "devices"}


def register(app: App) -> None:
    """Add the server's part of the group `fleet`."""
    fleet = app.group("fleet", "The devices of a fleet.", "Fleet")
    fleet.add(
        list_devices,
        "edge-fl fleet list --sort accuracy\nedge-fl fleet list --where 'site=berlin and not status=ready'",
        name="list",
    )
    fleet.add(traffic, "edge-fl fleet traffic --since 7d")
    fleet.add(admit, "edge-fl fleet admit pi-07")
    fleet.add(tag, "edge-fl fleet tag pi-07 site=berlin line=2\nedge-fl fleet tag 'pi-0*' line-")
    group = Commands(add_completion=False, help="Saved selectors, used as @GROUP in others.")
    fleet.add_typer(group, name="group")
    group.add(list_groups, "edge-fl fleet group list", name="list")
    group.add(save, "edge-fl fleet group save cameras 'site=berlin and tier=head'")
    group.add(remove, "edge-fl fleet group remove cameras")
    fleet.add(
        set_settings,
        "edge-fl fleet set site=berlin watch_s=60 budget.megabytes=50\nedge-fl fleet set pi-07 head=",
        name="set",
    )
    fleet.add(show_settings, "edge-fl fleet settings pi-07", name="settings")
    fleet.add(rename, "edge-fl fleet rename pi-07 kitchen")
    fleet.add(decommission, "edge-fl fleet decommission pi-07")


def list_devices(
    where: WhereOption = "",
    sort: Annotated[
        str, option("--sort COLUMN", "Sort by a column of --format json, lowest first: accuracy, agent, ...")
    ] = "device",
    *,
    broker: BrokerAddressOptions,
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the devices known to the broker: last reported state and capability; from the registry, their newest accuracy, whether their
    reports count ("quarantined", "revoked") and how much their updates differ from the others' (0: typical, 1 and above: outlier). The
    reason says why a device needs attention, or why its accuracy may be low or uncertain. With an identity also whether each device signed
    its state ("yes"), or why not to believe it ("forged", "unsigned"; "outdated": older than the last one that the server received, because
    the broker was restored or replays it).
    """
    from edge_fl_server import selectors
    from edge_fl_server.mqtt.connector import fleet_authorities
    from edge_fl_server.mqtt.devices import device_list
    from edge_fl_server.registry import Database, fleets

    registered = where or place.exists
    with closing(Database.existing(place.location) if registered else Database.open()) as db:
        if where:
            fleets.require(db, place.fleet)
        cas = fleet_authorities(broker.identity)
        known = device_list.devices(
            connect_to(broker), place.fleet, db, where=where, sort=sort, authorities=cas
        )
        if where and not known.rows:
            hint = selectors.mistyped(db, place.fleet, selectors.parsed(db, place.fleet, where))
            print_status(f"selector {where!r}: matches none of the devices{hint}")
    columns = dict(device_list.COLUMNS if format is Format.JSON else device_list.SHOWN)
    if isinstance(chosen := columns.get(sort), Column):
        columns[sort] = replace(chosen, rank=0)  # it is shown in every width
    show_table(known.rows, columns, format)
    if not known.online:
        print_status(f"fleet {place.fleet!r}: no server is online, so these states may be out of date")


def traffic(
    since: SinceOption = "",
    where: WhereOption = "",
    *,
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show how much each device sent with its reports (results, model updates), the largest first, and what it received for them:
    releases, models of rounds. MQTT's own bytes, states (about 1 KiB each) and log lines are not included.
    """
    from edge_fl_server import selectors
    from edge_fl_server.registry import registered_reports

    start = since_text(since)
    with registry(place) as db:
        found = registered_reports.traffic(db, place.fleet, start)
        chosen = selectors.selected(db, place.fleet, where) if where else found.keys()
    rows = [
        {"device": name, "reports": count, "up": up, "down": down}
        for name, (count, up, down) in sorted(found.items(), key=lambda one: (-one[1][1], one[0]))
        if name in {*chosen}
    ]
    show_table(rows, TRAFFIC, format)
    up, down = (units.size(sum(int(str(row[key])) for row in rows)) for key in ("up", "down"))
    period = f" since {units.clock(start)} UTC" if start else ""
    print_status(f"{counted(len(rows), 'device')} sent {up} and received {down}{period}")


def admit(
    device: Annotated[str, argument("DEVICE", "A device in quarantine.")],
    place: RegistryPlace,
) -> None:
    """End the quarantine of a device: its reports count again, and its count of rejected reports restarts at 0."""
    from edge_fl_server.registry import registered_devices

    with registry(place) as db:
        known = _known(db, place.fleet, device)
        if known.quarantine or known.removed:
            with acting(db, place.fleet, "admit", device):
                registered_devices.readmit(db, place.fleet, device)
    reasons = (
        f"quarantine ended ({known.quarantine})" * bool(known.quarantine),
        known.removed and "in the fleet again",
    )
    print_status(f"{device}: {', '.join(filter(None, reasons)) or 'not in quarantine; nothing was changed'}")
    if known.revoked:
        print_status(f"{device}: still blocked, {known.blocked_why}")


def tag(
    selector: SelectorArgument,
    changes: Annotated[
        list[str], argument("KEY=VALUE", "A tag to set, or KEY- to remove one; several are possible.")
    ],
    yes: YesOption = False,
    *,
    place: RegistryPlace,
) -> None:
    """Set or remove tags of devices; prints their names, and asks first if these are all. 'edge-fl fleet list' shows tags; docs/tags.md
    says what selectors can compare.
    """
    from edge_fl.fleet import tags
    from edge_fl_server.registry import registered_tags

    parsed = dict(map(tags.parse, changes))
    with registry(place) as db:
        names = confirmed(db, place.fleet, selector, "tag them", yes=yes, none=False)
        with acting(db, place.fleet, "tag", f"{selector}: {' '.join(changes)}"):
            registered_tags.change(db, place.fleet, names, parsed)
    for name in names:
        print(name)


def list_groups(
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the saved selectors, and how many devices each matches now."""
    from edge_fl_server import selectors
    from edge_fl_server.registry import registered_tags
    from edge_fl_server.selectors import SelectorError

    rows: list[dict[str, object]] = []
    with registry(place) as db:
        for name, text in registered_tags.saved_groups(db, place.fleet).items():
            try:
                count: int | None = len(selectors.selected(db, place.fleet, text))
            except SelectorError as error:  # it names a removed group
                count = None
                print_status(f"group {name!r}: {error.message}")
            rows.append({"group": name, "selector": text, "devices": count})
    show_table(rows, COLUMNS, format)


def save(
    group: GroupArgument,
    selector: SelectorArgument,
    place: RegistryPlace,
) -> None:
    """Save a selector as a group, or change a group; its devices follow from their tags and attributes at the time of use."""
    from edge_fl.fields import EXPECTED_NAME
    from edge_fl.wire.topics import NAME
    from edge_fl_server import selectors
    from edge_fl_server.registry import registered_tags
    from edge_fl_server.selectors import require_groups

    if not NAME.match(group):
        raise InputError(f"group {group[:100]!r}: {EXPECTED_NAME}")
    with registry(place) as db:
        saved = {**registered_tags.saved_groups(db, place.fleet), group: selector}
        require_groups(saved)  # a change must not make any group contain itself, or too large
        with acting(db, place.fleet, "group save", f"@{group}: {selector}"):
            registered_tags.save_group(db, place.fleet, group, selector)
        print_status(f"@{group}: {counted(len(selectors.selected(db, place.fleet, selector)), 'device')}")


def remove(
    group: GroupArgument,
    place: RegistryPlace,
) -> None:
    """Delete a saved selector that no other one uses."""
    from edge_fl_server.registry import registered_tags
    from edge_fl_server.selectors import SelectorError, parse

    with registry(place) as db:
        saved = registered_tags.saved_groups(db, place.fleet)
        if group not in saved:
            raise InputError(f"fleet {place.fleet!r}: no group {group!r}{nearest(group, saved)}")
        del saved[group]
        for name, text in saved.items():
            try:
                parse(text, saved)
            except SelectorError as error:
                raise InputError(
                    f"group {group!r}: used by @{name} ({text}); expected to change that first"
                ) from error
        with acting(db, place.fleet, "group remove", f"@{group}"):
            registered_tags.remove_group(db, place.fleet, group)


def set_settings(
    selector: SelectorArgument,
    changes: Annotated[
        list[str],
        argument(
            "KEY=VALUE",
            "A setting, such as watch_s=60, head=auto or classes=cat,dog; KEY= gives it back to the device.",
        ),
    ],
    yes: YesOption = False,
    *,
    place: RegistryPlace,
) -> None:
    """Change settings of devices from afar; prints their names, and asks first if these are all. Devices that are offline get them when
    they return. If a server is online, the others' answers are shown: exit code 1 if one rejects a value. What can be set, and what wins
    over it on a device: docs/remote-settings.md.
    """
    from edge_fl.fleet.remote_settings import require
    from edge_fl.heads import auto
    from edge_fl_server.registry import fleets, registered_devices

    tags = dict(map(_parsed, changes))
    require({key: value for key, value in tags.items() if value is not None}, "fleet set")
    if tags.get("head") is not None:
        auto.require_kinds([str(tags["head"])], "fleet set")
    with registry(place) as db:
        names = confirmed(db, place.fleet, selector, "change their settings", yes=yes, none=False)
        with acting(db, place.fleet, "settings", f"{selector}: {' '.join(changes)}"):
            registered_devices.change_settings(db, place.fleet, names, tags)
        for name in names:
            print(name)
        if not fleets.presence(db, place.fleet).online:
            print_status("no server is online: the next one sends them")
            return
        outcome = _outcome(db, place.fleet, names, set(tags))
    _show_outcome(outcome)


def _outcome(
    db: Database, fleet: str, names: Sequence[str], keys: Set[str]
) -> dict[tuple[str, str], list[str]]:
    """Wait until all devices that are online have answered -> the devices by setting and state."""
    from edge_fl.wire.messages import GONE
    from edge_fl_server.mqtt.devices import remote_settings
    from edge_fl_server.registry import registered_devices

    until_s = time.monotonic() + ANSWER_S
    gone = {
        record.device
        for record in registered_devices.listed(db, fleet)
        if record.status in {*GONE, registered_devices.UNKNOWN}
    }
    while True:
        desired = registered_devices.desired_settings(db, fleet)
        known = {record.device: record for record in registered_devices.listed(db, fleet)}
        found = [
            (name, row)
            for name in names
            for row in remote_settings.rows(desired[name], known[name].capability)
            if row.setting in keys and row.state
        ]
        waiting = any(row.state == remote_settings.WAITING and name not in gone for name, row in found)
        if not waiting or time.monotonic() > until_s:
            break
        time.sleep(POLL_S)
    outcome: dict[tuple[str, str], list[str]] = {}
    for name, row in found:
        outcome.setdefault((row.setting, row.state), []).append(name)
    return outcome


def _show_outcome(outcome: Mapping[tuple[str, str], Sequence[str]]) -> None:
    """Show which settings are in effect. Raises RunError if a device rejects a value."""
    from edge_fl.errors import shortened
    from edge_fl_server.mqtt.devices import remote_settings

    for (setting, state), names in outcome.items():
        print_status(f"{setting}: {state} ({shortened(names, 10)})")
    rejected = {setting for setting, state in outcome if state not in remote_settings.NO_FAULT}
    if rejected:
        raise RunError(
            f"{', '.join(sorted(rejected))}: not in effect on every device", "there the value before stays"
        )


def show_settings(
    selector: Annotated[
        str, argument("SELECTOR", "A device's name, or a selector [devices with settings from afar].")
    ] = "",
    *,
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show settings from afar, and those in effect; of one selected device also its others that are not at their defaults."""
    import msgspec

    from edge_fl_server.mqtt.devices import remote_settings
    from edge_fl_server.registry import registered_devices
    from edge_fl_server.selectors import mistyped, parsed, selected

    rows: list[dict[str, object]] = []
    with registry(place) as db:
        desired = registered_devices.desired_settings(db, place.fleet)
        known = {record.device: record.capability for record in registered_devices.listed(db, place.fleet)}
        everyone = registered_devices.names(db, place.fleet)
        names = (
            selected(db, place.fleet, selector)
            if selector
            else [name for name in everyone if name in desired]
        )
        if selector and not names:
            hint = mistyped(db, place.fleet, parsed(db, place.fleet, selector))
            raise InputError(f"selector {selector!r}: matches none of {len(everyone)} devices{hint}")
    for name in names:
        for row in remote_settings.rows(desired.get(name, remote_settings.NO_SETTINGS), known.get(name)):
            if row.state or (selector and len(names) == 1):
                rows.append({"device": name, **msgspec.structs.asdict(row)})
    show_table(rows, remote_settings.COLUMNS, format)


def _parsed(change: str) -> tuple[str, Any]:
    """Parse KEY=VALUE; the value is None for KEY=. Raises InputError."""
    from edge_fl.errors import nearest
    from edge_fl.fleet.remote_settings import DEFAULTS
    from edge_fl.toml import parse_value

    key, equals, text = change.partition("=")
    if not equals or key not in DEFAULTS:
        known = nearest(key, DEFAULTS) if equals else ", such as watch_s=60"
        raise InputError(
            f"fleet set: {change!r}: expected KEY=VALUE, a setting that can be set from afar{known}"
        )
    value = parse_value(text) if text else None
    if isinstance(value, str) and isinstance(DEFAULTS[key], list):
        value = value.split(",")
    return key, value


def decommission(
    device: Annotated[str, argument("DEVICE", "A device that leaves the fleet for good.")],
    yes: YesOption = False,
    identities: IdentitiesOption = IDENTITIES,
    *,
    place: RegistryPlace,
) -> None:
    """Remove a device from the fleet: revoke its certificate, end its assignments, ignore its messages. Reports and history stay."""
    from edge_fl_server.registry import registered_devices

    with registry(place) as db:
        known = _known(db, place.fleet, device)
        if known.removed:
            print_status(f"{device}: {known.removed} already")
        else:
            confirm(
                f"Decommission {device} (last seen {known.seen_at[:10] or 'never'})? Its certificate is revoked for good.",
                yes,
            )
        doing = nullcontext() if known.removed else acting(db, place.fleet, "decommission", device)
        with doing:
            _revoke(device, identities)  # first: repeating the command after an interruption completes it
            registered_devices.remove(db, place.fleet, device, known.removed or "decommissioned")
    print_status(f"{device}: decommissioned; its history stays in the registry; {SERVER_CLEARS}")
    print_status(
        "to erase the device itself, on it: edge-fl device reset --delete-identity (or device uninstall)"
    )


def rename(
    old: Annotated[str, argument("OLD", "Name of a device.")],
    new: Annotated[str, argument("NEW", "Its new name: a-z, 0-9 and '-'.")],
    yes: YesOption = False,
    identities: IdentitiesOption = IDENTITIES,
    *,
    place: RegistryPlace,
) -> None:
    """Rename a device: its history moves to the new name, which needs a certificate of its own; the old name's is revoked."""
    from edge_fl.wire.topics import checked_device
    from edge_fl_server.registry import registered_devices

    if checked_device(new) == old:
        raise InputError(f"{new!r}: expected another name than {old!r}")
    with registry(place) as db:
        known = _known(db, place.fleet, old)
        done = known.removed == f"renamed to {new}"
        if known.removed and not done:
            raise InputError(f"{old}: {known.removed}; expected a device of the fleet")
        if not done and registered_devices.get(db, place.fleet, new):
            raise InputError(
                f"fleet {place.fleet!r}: {new!r} is or was a device already, expected a new name"
            )
        claim = identities / "devices" / new
        if not done:
            confirm(f"Rename {old} to {new}? The device stops until it has the new identity.", yes)
        if _has_authority(identities) and not claim.exists():
            _edge_fl("fleet", "enrol", "--identities", os.fspath(identities), "--", new)
        with acting(db, place.fleet, "rename", f"{old} to {new}"):
            if not done:
                registered_devices.rename(db, place.fleet, old, new)
            _revoke(old, identities)
    print_status(f"{old}: renamed to {new}, with its reports and requests; {SERVER_CLEARS}")
    if _has_authority(identities):
        print_status(
            f"on the device: stop the agent, replace its identity folder by {text(claim)} (a claim, valid for 30 days), start the agent;"
            " heads, outbox and settings stay. A settings file with id = needs the new name"
        )
    else:
        print_status(f"on the device: id = {new!r} in its settings (or --id {new}), and restart its agent")


def _known(db: Database, fleet: str, device: str) -> DeviceRecord:
    """The record of a device. Raises InputError if there is none, or if no device can have the name."""
    from edge_fl.wire.topics import checked_device
    from edge_fl_server.registry import registered_devices

    if record := registered_devices.get(db, fleet, checked_device(device)):
        return record
    raise InputError(
        f"fleet {fleet!r}: no device {device!r}{nearest(device, registered_devices.names(db, fleet))}"
    )


def _has_authority(identities: Path) -> bool:
    return (identities / "ca.key").exists()


def _revoke(device: str, identities: Path) -> None:
    """Revoke the certificates of a device, if it has valid ones. Raises RunError."""
    if not _has_authority(identities):
        print_status(
            f"{device}: no certificate authority in {text(identities)} (--identities), so no certificate was revoked"
        )
        return
    rows = json.loads(
        _edge_fl("fleet", "certificates", "--format", "json", "--identities", os.fspath(identities))
    )
    if any(device in (row["name"], row["device"]) and row["state"] in ("valid", "used") for row in rows):
        print(_edge_fl("fleet", "revoke", "--identities", os.fspath(identities), "--", device), end="")


def _edge_fl(*arguments: str) -> str:
    """The output of an edge-fl command of the broker's package. Raises RunError with its error."""
    child = subprocess.run(
        [sys.executable, "-m", "edge_fl", *arguments],
        capture_output=True,
        text=True,
        timeout=CHILD_S,
        check=False,
    )
    if child.returncode:
        said = child.stderr.strip().splitlines()
        raise RunError(
            f"edge-fl {' '.join(arguments[:2])}: {said[-1] if said else 'failed'}",
            "the registry was not changed",
        )
    return child.stdout
