"""Options and checks of commands that act on selected devices; nothing heavy is imported here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from edge_fl.console.output import print_status
from edge_fl.console.units import counted
from edge_fl.errors import InputError
from edge_fl.options import option

if TYPE_CHECKING:
    from edge_fl_server.registry import Database

WhereOption = Annotated[
    str,
    option(
        "--where SELECTOR", "Only these devices, such as 'site=berlin and not arch=armv7l' or @GROUP [all]."
    ),
]
YesOption = Annotated[bool, option("--yes -y", "Also where the selector matches no device, or all devices.")]


def confirmed(
    db: Database, fleet: str, text: str, action: str, *, yes: bool = False, none: bool = True
) -> list[str]:
    """The devices that a selector matches, to act on. Asks if it matches no device or all, unless `yes`.

    With `none` false a selector that matches no device is always an error. Raises InputError, also where no terminal can answer.
    """
    from edge_fl_server.registry import devices
    from edge_fl_server.selectors import selection

    selector = selection.parsed(db, fleet, text)
    names, total = selection.selected(db, fleet, selector), len(devices.names(db, fleet))
    if names and (len(names) < total or total == 1):
        print_status(f"{text}: {len(names)} of {counted(total, 'device')}")
        return names
    found = (
        f"selector {text!r}: matches all {counted(total, 'device')}"
        if names
        else f"selector {text!r}: matches none of {counted(total, 'device')}"
    )
    found += selection.unknown_tags(db, fleet, selector)
    if not names and not none:
        raise InputError(found)
    if yes:
        print_status(found)
    elif not sys.stdin.isatty():
        raise InputError(f"{found}; expected --yes to {action}")
    elif not typer.confirm(f"{found}. {action[0].upper()}{action[1:]}?", err=True):
        raise InputError(f"{found}; not confirmed")
    return names
