"""Help of commands as plain text: options and commands under the headings of their panels, examples as written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

PANELS = ("Start", "Research", "Fleet", "Device", "Releases")
"""Headings of the root's commands, in this order."""
FIRST = "demo"
"""The command that is listed first: what to run first."""
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
ARGUMENTS, OPTIONS, COMMANDS = "Arguments", "Options", "Commands"


class HelpCommand(TyperCommand):
    """A command whose `epilog` is an example, one command per line."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_example(self.epilog, formatter)


class Group(TyperGroup):
    """A group that lists its commands with their whole first sentence."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        _write_parameters(self, ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [
            (
                getattr(command, "rich_help_panel", None) or COMMANDS,
                (name, first_sentence(command.help or "")),
            )
            for name, command in sorted(self.commands.items(), key=lambda item: item[0] != FIRST)
        ]
        _write_sections(formatter, rows, [*PANELS, COMMANDS])


def first_sentence(text: str) -> str:
    """The first sentence of a help text, on one line."""
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    rows = []
    for parameter in command.get_params(ctx):
        default = ARGUMENTS if parameter.param_type_name == "argument" else OPTIONS
        if record := parameter.get_help_record(ctx):
            name = record[0].partition(" <")[0]  # without the type, such as <str>; the metavar says more
            rows.append((getattr(parameter, "rich_help_panel", None) or default, (name, record[1])))
    panels = [panel for panel, _ in rows if panel not in (ARGUMENTS, OPTIONS)]
    _write_sections(formatter, rows, [ARGUMENTS, *panels, OPTIONS])


def _write_sections(
    formatter: Any, rows: Sequence[tuple[str, tuple[str, str]]], headings: Iterable[str]
) -> None:
    for heading in dict.fromkeys(headings):
        if section := [row for panel, row in rows if panel == heading]:
            with formatter.section(heading):
                formatter.write_dl(section)


def _write_example(example: str | None, formatter: Any) -> None:
    if example:
        with formatter.section("Example"):
            for line in example.splitlines():
                formatter.write(f"  {line}\n")
