"""Options are declared as in the help, and a command takes a group of them as one parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest

from edge_fl import cli
from edge_fl.cli import App
from edge_fl.options import DATA, ConnectionOptions, argument, option


@dataclass(frozen=True, kw_only=True)
class Place:
    """A group with a required option."""

    folder: Annotated[str, option("--dir FOLDER", "Where.", DATA)]
    names: Annotated[list[str] | None, option("-n --name NAME", "Who.")] = None


def show(
    what: Annotated[str, argument("WHAT", "What to show.")],
    loud: Annotated[bool, option("--loud/--quiet", "How.")] = True,
    *,
    place: Place,
    connection: ConnectionOptions,
) -> None:
    """Show what came."""
    print(what, loud, place, connection.given())  # noqa: T201


def run(app: App, *arguments: str) -> int:
    return cli._run(app, list(arguments))


@pytest.fixture
def app() -> App:
    app = App()
    app.group("group").add(show, "edge-fl group show pets --dir here")
    return app


def test_the_fields_of_a_group_are_options(app: App, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["group", "show", "pets", "--quiet", "--dir", "here", "-n", "a", "--name", "b", "--port", "7"]
    assert run(app, *command, "--host", "there", "--identity", "me") == 0
    given = {"host": "there", "port": 7, "identity": "me"}
    assert capsys.readouterr().out == f"pets False {Place(folder='here', names=['a', 'b'])} {given}\n"


def test_a_group_without_default_is_required_and_says_so(
    app: App, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, "group", "show", "pets") == 4
    assert "'--dir'" in capsys.readouterr().err
    assert run(app, "group", "show", "pets", "--dir", "x", "--fleet", "a/b") == 4
    assert "--fleet a/b: " in capsys.readouterr().err


def test_the_help_has_the_options_under_their_headings(app: App, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, "group", "show", "-h") == 0
    out = capsys.readouterr().out
    assert "Data:\n  --dir FOLDER  Where.  [required]\n" in out
    assert "-n, --name NAME" in out and "--loud / --quiet" in out and "--host HOST" in out


def test_a_list_of_commands_reads_no_options() -> None:
    def broken(options: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
        """Has options of a type that does not exist."""

    app = App()
    app.group("group").add(broken, "edge-fl group broken")
    assert run(app, "group") == 0
    assert run(app, "group", "broken") == 1
