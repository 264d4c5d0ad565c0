"""What the commands on releases share: a fleet's opened releases, the stages of a roll-out, and waiting for its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from edge_fl.errors import ConfigError, RunError
from edge_fl.options import BrokerAddressOptions, option
from edge_fl_server.cli.connection import acting_as, connect_to, registry
from edge_fl_server.cli.options import RegistryPlace
from edge_fl_server.cli.selection import WhereOption, YesOption, confirmed

if TYPE_CHECKING:
    from edge_fl_server.recipes.recipe import RolloutConfig
    from edge_fl_server.registry.records import RolloutState
    from edge_fl_server.release.rollout.commands import ReleaseCommands, Request

ROLLOUT = "Roll-out"  # heading in the help
WAIT_S = 3600.0
NO_OPTIONS = BrokerAddressOptions()
EXAMPLE = "release.rollout.success=0.95"
Wait = Annotated[
    float, option("--wait SECONDS", "Seconds to wait for the end of the roll-out.", ROLLOUT, min=0)
]


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Which devices get a release, and when."""

    stages: Annotated[
        str,
        option(
            "--stages SHARES",
            "Growing shares of the fleet, comma-separated; the last is 1.",
            ROLLOUT,
        ),
    ] = "0.05,0.25,1"
    settings: Annotated[
        list[str] | None,
        option(
            "--set KEY=VALUE",
            f"A setting of a recipe's roll-outs, such as {EXAMPLE}; may be repeated.",
            ROLLOUT,
        ),
    ] = None
    wait_s: Wait = WAIT_S
    where: WhereOption = ""
    yes: YesOption = False

    def plan(self, **defaults: object) -> RolloutConfig:
        """The stages, as in a recipe. Raises ConfigError."""
        return rollout_plan(self.stages, self.settings or (), where=self.where, **defaults)

    def confirm(self, releases: ReleaseCommands, action: str) -> None:
        """Ask if `where` matches no device or all. Raises InputError."""
        if self.where:
            confirmed(releases.db, releases.fleet, self.where, action, yes=self.yes)


def rollout_plan(stages: str, settings: Sequence[str] = (), **defaults: object) -> RolloutConfig:
    """Growing shares, or stages by the fleet's size if empty; `settings` are those of a recipe. Raises ConfigError."""
    from edge_fl.toml import apply, checked, parse_value
    from edge_fl_server.recipes.recipe import RolloutConfig

    shares = [parse_value(share) for share in stages.split(",")] if stages else "auto"
    plan = {"stages": shares, **defaults}
    tree = {"release": {"rollout": plan}}
    apply(settings, tree)
    if tree != {"release": {"rollout": plan}}:
        raise ConfigError(f"--set {' '.join(settings)}: expected only settings such as {EXAMPLE}")
    return checked(plan, RolloutConfig, "release rollout")


@contextmanager
def commands(
    place: RegistryPlace, broker: BrokerAddressOptions = NO_OPTIONS, *, new: bool = False
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
