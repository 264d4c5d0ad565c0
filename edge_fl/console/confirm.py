"""Ask before something that cannot be undone."""

import sys

import typer

from edge_fl.errors import InputError


def confirm(question: str, yes: bool) -> None:
    """Return if the answer is yes. Raises InputError for any other, and without a terminal to ask on."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError(f"{question} No terminal to ask on: expected --yes")
    if not typer.confirm(question, err=True):
        raise InputError("not confirmed")
