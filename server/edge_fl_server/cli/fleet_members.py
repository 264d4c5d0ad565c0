"""`edge-fl fleet rename` and `edge-fl fleet decommission`: a device's name, its certificate, and its place in the registry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edge_fl.cli import App
from edge_fl.console.output import confirm, print_status
from edge_fl.errors import InputError, RunError, nearest
from edge_fl.files.paths import text
from edge_fl.options import FOLDERS, YesOption, argument, option
from edge_fl_server.cli.connection import acting, registry
from edge_fl_server.cli.options import RegistryPlace

if TYPE_CHECKING:
    from edge_fl_server.registry import Database
    from edge_fl_server.registry.records import DeviceRecord

IDENTITIES = Path("runs/identities")
IdentitiesOption = Annotated[
    Path,
    option(
        "--identities FOLDER",
        "Folder of the certificate authority; without one the fleet has no certificates.",
        FOLDERS,
    ),
]
CHILD_S = 120.0
SERVER_CLEARS = "a running server clears its retained messages within a second, otherwise the next one does when it starts"


def register(app: App) -> None:
    """Add to the group `fleet`."""
    group = app.group("fleet")
    group.add(rename, "edge-fl fleet rename pi-07 kitchen")
    group.add(decommission, "edge-fl fleet decommission pi-07")


def decommission(
    device: Annotated[str, argument("DEVICE", "A device that leaves the fleet for good.")],
    yes: YesOption = False,
    identities: IdentitiesOption = IDENTITIES,
    *,
    place: RegistryPlace,
) -> None:
    """Remove a device from the fleet: revoke its certificate, end its assignments, ignore its messages. Reports and history stay."""
    from edge_fl_server.registry import devices

    with registry(place) as db:
        known = _known(db, place.fleet, device)
        if known.removed:
            print_status(f"{device}: {known.removed} already")
        else:
            confirm(
                f"Decommission {device} (last seen {known.seen_at[:10] or 'never'})? Its certificate is revoked for good.",
                yes,
            )
        with acting(db, place.fleet, "decommission", device):
            _revoke(device, identities)  # first: repeating the command after an interruption completes it
            devices.remove(db, place.fleet, device, known.removed or "decommissioned")
    print_status(f"{device}: decommissioned; its history stays in the registry; {SERVER_CLEARS}")
    print_status("to erase the device itself, on it: edge-fl device reset --identity (or device uninstall)")


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
    from edge_fl_server.registry import devices

    if checked_device(new) == old:
        raise InputError(f"{new!r}: expected another name than {old!r}")
    with registry(place) as db:
        known = _known(db, place.fleet, old)
        done = known.removed == f"renamed to {new}"
        if known.removed and not done:
            raise InputError(f"{old}: {known.removed}; expected a device of the fleet")
        if not done and devices.get(db, place.fleet, new):
            raise InputError(
                f"fleet {place.fleet!r}: {new!r} is or was a device already, expected a new name"
            )
        claim = identities / "devices" / new
        if not done:
            confirm(f"Rename {old} to {new}? The device stops until it has the new identity.", yes)
        if _has_authority(identities) and not claim.exists():
            _edge_fl("fleet", "enrol", "--home", os.fspath(identities), "--", new)
        with acting(db, place.fleet, "rename", f"{old} to {new}"):
            if not done:
                devices.rename(db, place.fleet, old, new)
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
    from edge_fl_server.registry import devices

    if record := devices.get(db, fleet, checked_device(device)):
        return record
    raise InputError(f"fleet {fleet!r}: no device {device!r}{nearest(device, devices.names(db, fleet))}")


def _has_authority(identities: Path) -> bool:
    return (identities / "ca.key").exists()


def _revoke(device: str, identities: Path) -> None:
    """Revoke the certificates of a device, if it has valid ones. Raises RunError."""
    if not _has_authority(identities):
        print_status(
            f"{device}: no certificate authority in {text(identities)} (--identities), so no certificate was revoked"
        )
        return
    rows = json.loads(_edge_fl("fleet", "certificates", "--format", "json", "--home", os.fspath(identities)))
    if any(device in (row["name"], row["device"]) and row["state"] in ("valid", "used") for row in rows):
        print(_edge_fl("fleet", "revoke", "--home", os.fspath(identities), "--", device), end="")


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
