"""What the server's commands share: options, the broker, the registry, who acts, and on which devices; nothing heavy is imported here."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_fl.console import units
from edge_fl.console.output import print_status
from edge_fl.console.units import counted
from edge_fl.errors import InputError
from edge_fl.options import CONNECTION, FOLDERS, LOOPBACK, TRAINING, BrokerAddressOptions, fleet_name, option
from edge_fl.wire.roles import ADMINISTRATOR, PERSON_ROLES, Person, local_person

if TYPE_CHECKING:
    from edge_fl_server.mqtt.connector import ServerConnect
    from edge_fl_server.registry import Database


HOME = Path("runs/releases")
RUNS = Path("runs")

FleetOption = Annotated[str, option("--fleet FLEET", "Name of the fleet.", CONNECTION, callback=fleet_name)]
RunsOption = Annotated[Path, option("--runs FOLDER", "Folder of all results.", FOLDERS)]
SetOption = Annotated[
    list[str] | None,
    option(
        "--set KEY=VALUE",
        "Setting of a recipe, such as rounds=3 or method.options.temperature=0.5; may be repeated.",
        TRAINING,
    ),
]
TrackOption = Annotated[
    list[str] | None,
    option(
        "--track VIEWER",
        "Also record every round in the run's folder for a viewer: tensorboard or mlflow; may be repeated.",
    ),
]
WindowOption = Annotated[
    float, option("--window SECONDS", "Length of a window or clip [from the recordings].", min=0)
]
RateOption = Annotated[float, option("--rate HZ", "Values per second [that of the recordings].", min=0)]
WhereOption = Annotated[
    str,
    option(
        "--where SELECTOR", "Only these devices, such as 'site=berlin and not arch=armv7l' or @GROUP [all]."
    ),
]


SinceOption = Annotated[
    str,
    option(
        "--since TIME",
        "From this time on: a day or time in UTC, such as 2026-11-23T14:00, yesterday, or an age, such as 2h or 7d.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class RegistryOptions:
    """Where the registry and the release keys are."""

    database: Annotated[
        str,
        option(
            "--database REGISTRY",
            "Registry: a file, or postgresql://user@host/name [server/registry.sqlite next to --home].",
            FOLDERS,
            envvar="EDGE_FL_DATABASE",
        ),
    ] = ""
    home: Annotated[Path, option("--home FOLDER", "Folder of the release keys and metadata.", FOLDERS)] = HOME

    @property
    def location(self) -> str:
        """The registry's file or address."""
        from edge_fl_server.registry.database import location

        return location(self.database, self.home)

    @property
    def exists(self) -> bool:
        """Whether a registry was named, or is where it is by default."""
        return bool(self.database) or Path(self.location).exists()


@dataclass(frozen=True, kw_only=True)
class RegistryPlace(RegistryOptions):
    """The fleet that a command works on, and where its registry is."""

    fleet: FleetOption = "main"


def since_text(since: str) -> str:
    """The time of --since as the registry writes times, "" without one. Raises InputError."""
    return units.parse_moment(since, "--since").isoformat(timespec="milliseconds") if since else ""


def settings(values: Mapping[str, object]) -> list[str]:
    """Format the options that were given as settings of a recipe, "key=value"."""
    given = {key: value for key, value in values.items() if value not in ("", None)}
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()]


def connect_to(broker: BrokerAddressOptions) -> ServerConnect:
    """Return a function that opens connections to the broker; the MQTT client is imported only now."""
    from edge_fl_server.mqtt.connector import connector

    return connector(broker.host or LOOPBACK, broker.port or 0, broker.identity)


def acting_as(folder: Path | str | None) -> Person:
    """Who runs a command with this identity: the name and role of its certificate, else the local user. Raises ConfigError.

    The check of the role protects from mistakes: who can write the registry can change it without a command.
    """
    from edge_fl.wire import identity

    certificate = identity.certificate_in(folder)
    if certificate is None:
        return local_person()
    if certificate.role in ("admin", "server"):
        return Person(certificate.name, ADMINISTRATOR)
    roles = frozenset(role for role in PERSON_ROLES if role == certificate.role)
    return Person(certificate.name, "certificate", roles)


@contextmanager
def registry(place: RegistryPlace, *, new: bool = False) -> Iterator[Database]:
    """The registry of these options; `new`: also one that does not exist yet.

    Raises ConfigError, and InputError if it does not have the fleet.
    """
    from edge_fl_server.registry import Database, fleets
    from edge_fl_server.release import ownership

    opened = Database.open if new else Database.existing
    with closing(opened(place.location)) as db:
        fleets.require(db, place.fleet)
        ownership.require(db, place.fleet, place.home)
        yield db


@contextmanager
def acting(
    db: Database, fleet: str, action: str, target: str, folder: Path | None = None
) -> Iterator[Person]:
    """Run the block as who runs the command, with a row in the audit log. Raises NotPermittedError."""
    from edge_fl_server.registry import audit

    person = acting_as(folder)
    with audit.acting(db, fleet, person, action, target):
        yield person


def confirmed(
    db: Database, fleet: str, text: str, action: str, *, yes: bool = False, none: bool = True
) -> list[str]:
    """The devices that a selector matches, to act on. Asks if it matches no device or all, unless `yes`.

    With `none` false a selector that matches no device is always an error. Raises InputError, also where no terminal can answer.
    """
    from edge_fl_server import selectors
    from edge_fl_server.registry import registered_devices

    selector = selectors.parsed(db, fleet, text)
    names, total = selectors.selected(db, fleet, selector), len(registered_devices.names(db, fleet))
    if names and (len(names) < total or total == 1):
        print_status(f"{text}: {len(names)} of {counted(total, 'device')}")
        return names
    found = (
        f"selector {text!r}: matches all {counted(total, 'device')}"
        if names
        else f"selector {text!r}: matches none of {counted(total, 'device')}"
    )
    found += selectors.mistyped(db, fleet, selector)
    if not names and not none:
        raise InputError(found)
    if yes:
        print_status(found)
    elif not sys.stdin.isatty():
        raise InputError(f"{found}; expected --yes to {action}")
    elif not typer.confirm(f"{found}. {action[0].upper()}{action[1:]}?", err=True):
        raise InputError(f"{found}; not confirmed")
    return names
