"""`edge-fl release keys list | rotate | take-out | add`: the keys that sign releases."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_fl.cli import Commands, FormatOption
from edge_fl.console.output import Format, show_table
from edge_fl.errors import InputError
from edge_fl.files.paths import text
from edge_fl_server.cli.options import HOME, FleetOption, HomeOption

if TYPE_CHECKING:
    from edge_fl_server.release.repository import Repository

ElsewhereOption = Annotated[
    list[Path] | None,
    typer.Option("--with", metavar="FOLDER", help="A folder with keys that were moved off the server."),
]


class Role(StrEnum):
    """A role of the signed metadata."""

    ROOT = "root"
    TARGETS = "targets"
    SNAPSHOT = "snapshot"
    TIMESTAMP = "timestamp"


RoleArgument = Annotated[Role, typer.Argument(metavar="ROLE", help="What the key signs.")]


def register(release: Commands) -> None:
    """Add the group `release keys`."""
    keys = Commands(
        add_completion=False, help="The keys that sign releases; change them while no server is online."
    )
    release.add_typer(keys, name="keys")
    keys.add(list_keys, "edge-fl release keys list", name="list")
    keys.add(rotate, "edge-fl release keys rotate timestamp")
    keys.add(take_out, "edge-fl release keys take-out root --to /media/usb/keys")
    keys.add(add, "edge-fl release keys add root --threshold 2 --to /media/usb/keys")


def list_keys(
    home: HomeOption = HOME,
    fleet: FleetOption = "main",
    elsewhere: ElsewhereOption = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the keys: role, threshold, expiry and location."""
    import msgspec

    rows = [msgspec.to_builtins(row) for row in open_repository(home, fleet, elsewhere).key_rows()]
    show_table(rows, {name: name for name in ("role", "key", "threshold", "expires", "place")}, format)


def rotate(
    role: RoleArgument,
    home: HomeOption = HOME,
    fleet: FleetOption = "main",
    elsewhere: ElsewhereOption = None,
) -> None:
    """Replace a role's key; devices reject the old one once they have the new root metadata."""
    for name, _ in open_repository(home, fleet, elsewhere).rotate(role):
        print(name)


def take_out(
    role: RoleArgument,
    to: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Folder to move the key to, on other storage than this machine's."
        ),
    ],
    home: HomeOption = HOME,
    fleet: FleetOption = "main",
) -> None:
    """Move a role's key off the server: root's, needed only for rotations, or targets', to sign releases elsewhere."""
    for key in open_repository(home, fleet).take_out(role, to):
        print(text(to / f"{key}.pem"))


def add(
    role: RoleArgument,
    threshold: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of the role's keys that must sign.")
    ],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write the new key to.")],
    home: HomeOption = HOME,
    fleet: FleetOption = "main",
    elsewhere: ElsewhereOption = None,
) -> None:
    """Add a key to a role, so that a single stolen key is not enough."""
    for name, _ in open_repository(home, fleet, elsewhere).add_key(role, threshold, to):
        print(name)


def open_repository(home: Path, fleet: str, elsewhere: list[Path] | None = None) -> Repository:
    """Open a fleet's repository; `elsewhere` are folders with further keys. Raises InputError if there is none."""
    from edge_fl_server.release.repository import Repository

    if not (home / fleet / "metadata").is_dir():
        raise InputError(
            f"{text(home / fleet)}: no releases; expected the --home of a server that has released"
        )
    return Repository(home / fleet, elsewhere=elsewhere or ())
