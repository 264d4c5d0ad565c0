"""`edge-fl fleet list | admit`: the devices of a fleet, and their quarantine."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Annotated

from edge_fl.cli import App
from edge_fl.console.output import Format, print_status, show_table
from edge_fl.options import BrokerAddressOptions, FormatOption, argument
from edge_fl_server.cli import fleet_settings, fleet_tags
from edge_fl_server.cli.connection import acting, connect_to, registry
from edge_fl_server.cli.options import RegistryPlace
from edge_fl_server.cli.selection import WhereOption

if TYPE_CHECKING:
    from edge_fl.fleet.settings import DesiredSettings


def register(app: App) -> None:
    """Add the server's part of the group `fleet`."""
    group = app.group("fleet", "The devices of a fleet.", "Fleet")
    group.add(list_devices, "edge-fl fleet list --where 'site=berlin and not status=ready'", name="list")
    group.add(admit, "edge-fl fleet admit pi-07")
    fleet_tags.register(group)
    fleet_settings.register(group)


def list_devices(
    where: WhereOption = "",
    *,
    broker: BrokerAddressOptions,
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the devices known to the broker: last reported state and capability; from the registry, their newest accuracy, whether their
    reports count ("quarantined", "revoked") and how much their updates differ from the others' (0: typical, 1 and above: outlier). With an
    identity also whether each device signed its state ("yes"), or why not to believe it ("forged", "unsigned"; "outdated": older than the
    last one that the server received, because the broker was restored or replays it).
    """
    from edge_fl_server.mqtt.connector import fleet_authorities
    from edge_fl_server.mqtt.devices import device_list
    from edge_fl_server.registry import Database, devices, fleets, reports, tags
    from edge_fl_server.registry.records import DeviceRecord
    from edge_fl_server.selectors.selection import selected

    registered: dict[str, DeviceRecord] = {}
    tagged: dict[str, dict[str, str]] = {}
    accuracies: dict[str, float] = {}
    desired: dict[str, DesiredSettings] = {}
    chosen: set[str] | None = None
    fleets_known: list[str] = []
    if where or place.exists:
        with closing(Database.existing(place.location)) as db:
            if where:
                fleets.require(db, place.fleet)
            fleets_known = fleets.known(db)
            registered = {record.device: record for record in devices.listed(db, place.fleet)}
            tagged = tags.of_devices(db, place.fleet)
            accuracies = reports.newest_accuracies(db, place.fleet)
            desired = devices.desired_settings(db, place.fleet)
            chosen = set(selected(db, place.fleet, where)) if where else None
    known = device_list.devices(
        connect_to(broker),
        place.fleet,
        registered,
        authorities=fleet_authorities(broker.identity),
        tagged=tagged,
        accuracies=accuracies,
        desired=desired,
        fleets=fleets_known,
    )
    rows = [row for row in known.rows if chosen is None or row["device"] in chosen]
    show_table(rows, device_list.COLUMNS, format)
    if not known.online:
        print_status(f"fleet {place.fleet!r}: no server is online, so these states may be out of date")


def admit(
    device: Annotated[str, argument("DEVICE", "A device in quarantine.")],
    place: RegistryPlace,
) -> None:
    """End the quarantine of a device: its reports count again, and its count of rejected reports restarts at 0."""
    from edge_fl.errors import InputError, nearest
    from edge_fl.wire.topics import checked_device
    from edge_fl_server.registry import devices

    checked_device(device)
    with registry(place) as db:
        known = {record.device: record for record in devices.listed(db, place.fleet)}
        if device not in known:
            raise InputError(f"fleet {place.fleet!r}: no device {device!r}{nearest(device, known)}")
        with acting(db, place.fleet, "admit", device):
            devices.readmit(db, place.fleet, device)
    reason = known[device].quarantine
    print_status(f"{device}: quarantine ended ({reason})" if reason else f"{device}: not in quarantine")
    if known[device].revoked:
        print_status(f"{device}: still blocked, {known[device].blocked_why}")
