"""`edge-fl fleet set` and `edge-fl fleet settings`: settings of devices from afar, and those in effect."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Annotated, Any

from edge_fl.cli import Commands
from edge_fl.console.output import Format, print_status, show_table
from edge_fl.errors import InputError, RunError
from edge_fl.options import FormatOption, argument
from edge_fl_server.cli.connection import acting, registry
from edge_fl_server.cli.fleet_tags import SelectorArgument
from edge_fl_server.cli.options import RegistryPlace
from edge_fl_server.cli.selection import YesOption, confirmed

if TYPE_CHECKING:
    from edge_fl_server.registry import Database

ANSWER_S, POLL_S = 20.0, 0.2
"""How long `fleet set` waits for the devices that are online: an agent applies settings by starting again, in about a second."""


def register(fleet: Commands) -> None:
    """Add `fleet set` and `fleet settings`."""
    fleet.add(
        set_settings,
        "edge-fl fleet set site=berlin watch_s=60 budget.megabytes=50\nedge-fl fleet set pi-07 head=",
        name="set",
    )
    fleet.add(show_settings, "edge-fl fleet settings pi-07", name="settings")


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
    """Change settings of devices from afar; prints their names. Devices that are offline get them when they return. If a server is
    online, the others' answers are shown: exit code 1 if one rejects a value. What can be set, and what wins over it on a device:
    docs/remote-settings.md.
    """
    from edge_fl import heads
    from edge_fl.fleet.settings import require
    from edge_fl.heads.auto import AUTO
    from edge_fl_server.registry import devices, servers

    given = dict(map(_parsed, changes))
    require({key: value for key, value in given.items() if value is not None}, "fleet set")
    if given.get("head") not in (None, AUTO):
        heads.find(str(given["head"]))
    with registry(place) as db:
        names = confirmed(db, place.fleet, selector, "change their settings", yes=yes, none=False)
        with acting(db, place.fleet, "settings", f"{selector}: {' '.join(changes)}"):
            devices.change_settings(db, place.fleet, names, given)
        for name in names:
            print(name)
        if not servers.presence(db, place.fleet).online:
            print_status("no server is online: the next one sends them")
            return
        outcome = _outcome(db, place.fleet, names, set(given))
    _show_outcome(outcome)


def _outcome(
    db: Database, fleet: str, names: Sequence[str], keys: Set[str]
) -> dict[tuple[str, str], list[str]]:
    """Wait until all devices that are online have answered -> the devices by setting and state."""
    from edge_fl.wire.messages import GONE
    from edge_fl_server.mqtt.devices import settings_list
    from edge_fl_server.registry import devices

    until_s = time.monotonic() + ANSWER_S
    gone = {
        record.device for record in devices.listed(db, fleet) if record.status in {*GONE, devices.UNKNOWN}
    }
    while True:
        desired = devices.desired_settings(db, fleet)
        known = {record.device: record for record in devices.listed(db, fleet)}
        found = [
            (name, row)
            for name in names
            for row in settings_list.rows(desired[name], known[name].capability)
            if row.setting in keys and row.state
        ]
        waiting = any(row.state == settings_list.WAITING and name not in gone for name, row in found)
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
    from edge_fl_server.mqtt.devices import settings_list

    for (setting, state), names in outcome.items():
        print_status(f"{setting}: {state} ({shortened(names, 10)})")
    rejected = {setting for setting, state in outcome if state not in settings_list.NO_FAULT}
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

    from edge_fl_server.mqtt.devices import settings_list
    from edge_fl_server.registry import devices
    from edge_fl_server.selectors.selection import parsed, selected, unknown_tags

    rows: list[dict[str, object]] = []
    with registry(place) as db:
        desired = devices.desired_settings(db, place.fleet)
        known = {record.device: record.capability for record in devices.listed(db, place.fleet)}
        everyone = devices.names(db, place.fleet)
        names = (
            selected(db, place.fleet, selector)
            if selector
            else [name for name in everyone if name in desired]
        )
        if selector and not names:
            hint = unknown_tags(db, place.fleet, parsed(db, place.fleet, selector))
            raise InputError(f"selector {selector!r}: matches none of {len(everyone)} devices{hint}")
    for name in names:
        for row in settings_list.rows(desired.get(name, settings_list.NO_SETTINGS), known.get(name)):
            if row.state or (selector and len(names) == 1):
                rows.append({"device": name, **msgspec.structs.asdict(row)})
    show_table(rows, settings_list.COLUMNS, format)


def _parsed(change: str) -> tuple[str, Any]:
    """Parse KEY=VALUE; the value is None for KEY=. Raises InputError."""
    from edge_fl.errors import nearest
    from edge_fl.fleet.settings import DEFAULTS
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
