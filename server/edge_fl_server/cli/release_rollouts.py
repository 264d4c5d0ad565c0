"""What the commands on releases share: a fleet's opened releases, the stages of a roll-out, and waiting for its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_fl.errors import ConfigError, RunError
from edge_fl_server.cli.connection import acting_as, connect_to

if TYPE_CHECKING:
    from edge_fl_server.recipes.recipe import RolloutConfig
    from edge_fl_server.registry.records import RolloutState
    from edge_fl_server.release.rollout.commands import ReleaseCommands, Request

Wait = Annotated[
    float,
    typer.Option(
        "--wait",
        metavar="SECONDS",
        rich_help_panel="Roll-out",
        min=0,
        help="Seconds to wait for the end of the roll-out.",
    ),
]
WAIT_S = 3600.0


@contextmanager
def commands(
    home: Path,
    fleet: str,
    database: str,
    host: str = "127.0.0.1",
    port: int | None = None,
    identity: Path | None = None,
    *,
    new: bool = False,
) -> Iterator[ReleaseCommands]:
    """The commands on a fleet's releases, with the registry open; `new`: also one that does not exist yet."""
    from edge_fl_server.mqtt.connector import fleet_authorities
    from edge_fl_server.registry import Database, fleets
    from edge_fl_server.registry.database import location
    from edge_fl_server.release import ownership
    from edge_fl_server.release.rollout.commands import ReleaseCommands

    opened = Database.open if new else Database.existing
    with closing(opened(location(database, home))) as db:
        fleets.require(db, fleet)
        ownership.require(db, fleet, home)
        connect = connect_to(host, port, identity)
        yield ReleaseCommands(connect, fleet, home, db, acting_as(identity), fleet_authorities(identity))


def carry_out(releases: ReleaseCommands, request: Request, wait_s: float, *wanted: RolloutState) -> None:
    """Carry a request out with progress on stderr, and print the state of its roll-out.

    Raises RunError if that is not one of `wanted` [completed].
    """
    from edge_fl.console.progress import Progress

    with Progress() as progress:
        record = releases.carry_out(request, progress.print, wait_s, progress)
    print(record.state)
    if record.state not in (wanted or ("completed",)):
        abort = f"edge-fl release abort{' --agent' if record.subject == 'agent' else ''}"
        consequence = {
            "paused": f"its devices keep it until '{abort}'; 'edge-fl release list' shows it",
            "aborted": "its devices return to the release before",
        }.get(record.state, "")
        raise RunError(f"{record.name}: {record.state}, {record.reason}", consequence)


def rollout_plan(stages: str, **fields: object) -> RolloutConfig:
    """Stages from an option: growing shares, or by the fleet's size if empty. Raises ConfigError."""
    import msgspec

    from edge_fl_server.recipes.recipe import RolloutConfig

    try:
        shares = [float(share) for share in stages.split(",")] if stages else "auto"
        return msgspec.convert({"stages": shares, **fields}, RolloutConfig)
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"release rollout: {error}") from error
