"""What the commands on releases share: a fleet's opened releases, the stages of a roll-out, and waiting for its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

from edge_fl.errors import ConfigError, RunError
from edge_fl.options import Broker, option
from edge_fl_server.cli.connection import acting_as, connect_to, registry
from edge_fl_server.cli.options import RegistryPlace

if TYPE_CHECKING:
    from edge_fl_server.recipes.recipe import RolloutConfig
    from edge_fl_server.registry.records import RolloutState
    from edge_fl_server.release.rollout.commands import ReleaseCommands, Request

Wait = Annotated[
    float, option("--wait SECONDS", "Seconds to wait for the end of the roll-out.", "Roll-out", min=0)
]
WAIT_S = 3600.0
NO_OPTIONS = Broker()


@contextmanager
def commands(
    place: RegistryPlace, broker: Broker = NO_OPTIONS, *, new: bool = False
) -> Iterator[ReleaseCommands]:
    """The commands on a fleet's releases, with the registry open; `new`: also one that does not exist yet."""
    from edge_fl_server.mqtt.connector import fleet_authorities
    from edge_fl_server.release.rollout.commands import ReleaseCommands

    with registry(place, new=new) as db:
        person, authorities = acting_as(broker.identity), fleet_authorities(broker.identity)
        yield ReleaseCommands(connect_to(broker), place.fleet, place.home, db, person, authorities)


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
