"""`edge-fl release keys list | rotate | take-out | add`: the keys that sign releases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from edge_fl.cli import Commands
from edge_fl.console.output import Format, print_status, show_table
from edge_fl.errors import InputError, nearest
from edge_fl.files.paths import text
from edge_fl.options import FormatOption, argument, option
from edge_fl_server.cli.connection import acting, registry
from edge_fl_server.cli.options import RegistryPlace

if TYPE_CHECKING:
    from edge_fl_server.release.repository import Repository

ElsewhereOption = Annotated[
    list[Path] | None, option("--with FOLDER", "A folder with keys that were moved off the server.")
]


RoleArgument = Annotated[
    Literal["root", "targets", "snapshot", "timestamp"], argument("ROLE", "What the key signs.")
]


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
    elsewhere: ElsewhereOption = None,
    *,
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the keys: role, threshold, expiry and location."""
    import msgspec

    rows = [msgspec.to_builtins(row) for row in open_repository(place, elsewhere).key_rows()]
    show_table(rows, {name: name for name in ("role", "key", "threshold", "expires", "place")}, format)


def rotate(
    role: RoleArgument,
    elsewhere: ElsewhereOption = None,
    *,
    place: RegistryPlace,
) -> None:
    """Replace a role's key; devices reject the old one once they have the new root metadata."""
    with changing(place, "keys rotate", role, elsewhere) as repository:
        for name, _ in repository.rotate(role):
            print(name)


def take_out(
    role: RoleArgument,
    to: Annotated[
        Path, option("--to FOLDER", "Folder to move the key to, on other storage than this machine's.")
    ],
    place: RegistryPlace,
) -> None:
    """Move a role's key off the server: root's, needed only for rotations, or targets', to sign releases elsewhere."""
    with changing(place, "keys take-out", role) as repository:
        for key in repository.take_out(role, to):
            print(text(to / f"{key}.pem"))


def add(
    role: RoleArgument,
    threshold: Annotated[int, option("--threshold N", "Number of the role's keys that must sign.", min=1)],
    to: Annotated[Path, option("--to FOLDER", "Folder to write the new key to.")],
    elsewhere: ElsewhereOption = None,
    *,
    place: RegistryPlace,
) -> None:
    """Add a key to a role, so that a single stolen key is not enough."""
    with changing(place, "keys add", role, elsewhere) as repository:
        for name, _ in repository.add_key(role, threshold, to):
            print(name)


@contextmanager
def changing(
    place: RegistryPlace, action: str, target: str, elsewhere: list[Path] | None = None
) -> Iterator[Repository]:
    """A fleet's repository, to be changed in the block; the audit log has the action where the registry is on this machine."""
    repository = open_repository(place, elsewhere)
    if place.exists:
        with registry(place) as db, acting(db, place.fleet, action, target):
            yield repository
    else:
        print_status(f"no registry at {place.location}: this is not in the audit log (--database)")
        yield repository


def open_repository(place: RegistryPlace, elsewhere: list[Path] | None = None) -> Repository:
    """Open a fleet's repository; `elsewhere` are folders with further keys. Raises InputError if there is none."""
    from edge_fl_server.release.repository import Repository

    folder, fleet = place.home / place.fleet, place.fleet
    if not (folder / "metadata").is_dir():
        others = [found.parent.name for found in place.home.glob("*/metadata")]
        raise InputError(
            f"{text(folder)}: no releases of fleet {fleet!r}{nearest(fleet, others)};"
            " expected the --home of a server that has released"
        )
    return Repository(folder, elsewhere=elsewhere or ())
