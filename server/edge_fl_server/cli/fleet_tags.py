"""`edge-fl fleet tag` and `edge-fl fleet group list | save | remove`: tags of devices, and saved selectors."""

from typing import Annotated

from edge_fl.cli import Commands
from edge_fl.console.output import Format, print_status, show_table
from edge_fl.console.tables import Columns
from edge_fl.console.units import counted
from edge_fl.errors import InputError, nearest
from edge_fl.options import FormatOption, argument
from edge_fl_server.cli.connection import acting, registry
from edge_fl_server.cli.options import RegistryPlace
from edge_fl_server.cli.selection import YesOption, confirmed

SelectorArgument = Annotated[
    str, argument("SELECTOR", "A device's name, or a selector such as 'site=berlin and tier=full'.")
]
GroupArgument = Annotated[str, argument("GROUP", "Name of the group: a-z, 0-9 and '-'.")]
COLUMNS: Columns = {"group": "group", "selector": "selector", "devices": "devices"}


def register(fleet: Commands) -> None:
    """Add `fleet tag` and the group `fleet group`."""
    fleet.add(tag, "edge-fl fleet tag pi-07 site=berlin line=2\nedge-fl fleet tag 'pi-0*' line-")
    group = Commands(add_completion=False, help="Saved selectors, used as @GROUP in others.")
    fleet.add_typer(group, name="group")
    group.add(list_groups, "edge-fl fleet group list", name="list")
    group.add(save, "edge-fl fleet group save cameras 'site=berlin and tier=head'")
    group.add(remove, "edge-fl fleet group remove cameras")


def tag(
    selector: SelectorArgument,
    changes: Annotated[
        list[str], argument("KEY=VALUE", "A tag to set, or KEY- to remove one; several are possible.")
    ],
    yes: YesOption = False,
    *,
    place: RegistryPlace,
) -> None:
    """Set or remove tags of devices; prints their names. 'edge-fl fleet list' shows tags, and docs/tags.md what selectors can compare."""
    from edge_fl.fleet import tags as given
    from edge_fl_server.registry import tags

    parsed = dict(map(given.parse, changes))
    with registry(place) as db:
        names = confirmed(db, place.fleet, selector, "tag them", yes=yes, none=False)
        with acting(db, place.fleet, "tag", f"{selector}: {' '.join(changes)}"):
            tags.change(db, place.fleet, names, parsed)
    for name in names:
        print(name)


def list_groups(
    place: RegistryPlace,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the saved selectors, and how many devices each matches now."""
    from edge_fl_server.registry import tags
    from edge_fl_server.selectors import SelectorError, selection

    rows: list[dict[str, object]] = []
    with registry(place) as db:
        for name, text in tags.saved_groups(db, place.fleet).items():
            try:
                count: int | None = len(selection.selected(db, place.fleet, text))
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
    from edge_fl_server.registry import tags
    from edge_fl_server.selectors import require_groups, selection

    if not NAME.match(group):
        raise InputError(f"group {group[:100]!r}: {EXPECTED_NAME}")
    with registry(place) as db:
        saved = {**tags.saved_groups(db, place.fleet), group: selector}
        require_groups(saved)  # a change must not make any group contain itself, or too large
        with acting(db, place.fleet, "group save", f"@{group}: {selector}"):
            tags.save_group(db, place.fleet, group, selector)
        print_status(f"@{group}: {counted(len(selection.selected(db, place.fleet, selector)), 'device')}")


def remove(
    group: GroupArgument,
    place: RegistryPlace,
) -> None:
    """Delete a saved selector that no other one uses."""
    from edge_fl_server.registry import tags
    from edge_fl_server.selectors import SelectorError, parse

    with registry(place) as db:
        saved = tags.saved_groups(db, place.fleet)
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
            tags.remove_group(db, place.fleet, group)
