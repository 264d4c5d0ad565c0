"""`edge-fl release list | rollout | pause | abort | rollback`, and the keys that sign releases. Nothing heavy before a command runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_fl.cli import App, FormatOption, IdentityOption
from edge_fl.console.output import Format, show_table
from edge_fl.errors import ConfigError, ConnectError
from server.cli.options import HOME, DatabaseOption, FleetOption, HomeOption, HostOption, PortOption

if TYPE_CHECKING:
    from edge_fl.config import RolloutConfig
    from server.release.repository import Repository
    from server.release.rollout.control import ReleaseControl

Wait = Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for its end.")]
WAIT_S = 3600.0
With = Annotated[list[Path] | None, typer.Option("--with", help="A folder with keys that were taken out.")]
Number = Annotated[int | None, typer.Argument(min=1, help="A kept release; see 'release list'.")]


class Role(StrEnum):
    """What a key signs."""

    ROOT = "root"
    TARGETS = "targets"
    SNAPSHOT = "snapshot"
    TIMESTAMP = "timestamp"


RoleArgument = Annotated[Role, typer.Argument(help="What the key signs.")]


def register(app: App) -> None:
    """Adds the group `release`."""
    release = app.group(
        "release", help="Releases of the extractor: roll out in stages, pause, roll back, export, keys."
    )
    release.command("list")(list_releases)
    for command in (rollout, pause, abort, rollback, export):
        release.command()(command)
    keys = typer.Typer(help="The keys that sign releases; change them while no server is online.")
    release.add_typer(keys, name="keys")
    keys.command("list")(list_keys)
    for change in (rotate, take_out, add):
        keys.command()(change)


def list_releases(
    home: HomeOption = HOME,
    fleet: FleetOption = "main",
    database: DatabaseOption = "",
    format: FormatOption = Format.TABLE,
) -> None:
    """List the kept releases, the newest first, and how the last roll-out of each stands."""
    import msgspec

    from server.release.rollout import control

    with _control(home, fleet, database) as releases:
        show_table([msgspec.to_builtins(row) for row in releases.rows()], control.COLUMNS, format)


def rollout(
    release: Number = None,
    stages: Annotated[str, typer.Option(help="Growing shares of the fleet; the last is 1.")] = "0.05,0.25,1",
    success: Annotated[float, typer.Option(help="The share of a stage that must succeed.")] = 0.9,
    false_abort: Annotated[
        float, typer.Option(help="Largest chance to abort though nothing is wrong.")
    ] = 0.02,
    stage_wait_s: Annotated[
        float, typer.Option("--stage-wait", help="Seconds that a stage has to answer.")
    ] = 600.0,
    wait_s: Wait = WAIT_S,
    home: HomeOption = HOME,
    fleet: FleetOption = "main",
    database: DatabaseOption = "",
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    identity: IdentityOption = None,
) -> None:
    """Roll out a kept release (by default the last), stage after stage, or resume a paused roll-out."""
    plan = _plan(stages, success, false_abort, stage_wait_s)
    with _control(home, fleet, database, host, port, identity) as releases:
        _carry_out(releases, releases.roll_out(release, plan), wait_s)


def pause(
    wait_s: Wait = 30.0,
    home: HomeOption = HOME,
    fleet: FleetOption = "main",
    database: DatabaseOption = "",
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    identity: IdentityOption = None,
) -> None:
    """Pause the roll-out: no further stage begins; 'release rollout' resumes it."""
    with _control(home, fleet, database, host, port, identity) as releases:
        _carry_out(releases, releases.steer("paused"), wait_s)


def abort(
    wait_s: Wait = 60.0,
    home: HomeOption = HOME,
    fleet: FleetOption = "main",
    database: DatabaseOption = "",
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    identity: IdentityOption = None,
) -> None:
    """Abort the roll-out: devices that have the release go back to the one before."""
    with _control(home, fleet, database, host, port, identity) as releases:
        _carry_out(releases, releases.steer("aborted"), wait_s)


def rollback(
    release: Number = None,
    wait_s: Wait = WAIT_S,
    home: HomeOption = HOME,
    fleet: FleetOption = "main",
    database: DatabaseOption = "",
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    identity: IdentityOption = None,
) -> None:
    """Roll the whole fleet back at once: to the release before, or to a kept one."""
    with _control(home, fleet, database, host, port, identity) as releases:
        _carry_out(releases, releases.roll_back(release), wait_s)


def export(
    folder: Annotated[Path, typer.Argument(help="What a web server serves: metadata/ and targets/.")],
    keep: Annotated[
        bool | None,
        typer.Option(
            "--keep/--no-keep",
            help="Whether releases, roll-outs and roll-backs go there too from now on [as it was].",
        ),
    ] = None,
    home: HomeOption = HOME,
    fleet: FleetOption = "main",
) -> None:
    """Write the signed repository as static files, for devices and auditors that fetch over HTTP; prints those that are new."""
    from server.release import website

    repository = _repository(home, fleet, None)
    for path in website.export(repository, folder):
        print(path)
    if keep is not None:
        website.keep(repository, folder if keep else None)


def list_keys(
    home: HomeOption = HOME,
    fleet: FleetOption = "main",
    elsewhere: With = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """List which key signs what, when that expires, and where the key is."""
    import msgspec

    rows = [msgspec.to_builtins(row) for row in _repository(home, fleet, elsewhere).key_rows()]
    show_table(rows, {name: name for name in ("role", "key", "threshold", "expires", "place")}, format)


def rotate(
    role: RoleArgument, home: HomeOption = HOME, fleet: FleetOption = "main", elsewhere: With = None
) -> None:
    """Replace a role's key; devices refuse the old one as soon as they see the new root."""
    for name, _ in _repository(home, fleet, elsewhere).rotate(role):
        print(name)


def take_out(
    role: RoleArgument,
    to: Annotated[Path, typer.Option(help="The folder that takes the key: not one of this machine.")],
    home: HomeOption = HOME,
    fleet: FleetOption = "main",
) -> None:
    """Move a role's key off the server: of root, which is needed for rotations only, or of targets, to sign releases elsewhere."""
    for key in _repository(home, fleet, None).take_out(role, to):
        print(to / f"{key}.pem")


def add(
    role: RoleArgument,
    threshold: Annotated[int, typer.Option(min=1, help="How many of the role's keys must sign.")],
    to: Annotated[Path, typer.Option(help="The folder that takes the new key.")],
    home: HomeOption = HOME,
    fleet: FleetOption = "main",
    elsewhere: With = None,
) -> None:
    """Add a key to a role, so that one stolen key is not enough."""
    for name, _ in _repository(home, fleet, elsewhere).add_key(role, threshold, to):
        print(name)


def _repository(home: Path, fleet: str, elsewhere: list[Path] | None) -> Repository:
    from edge_fl.errors import InputError
    from server.release.repository import Repository

    if not (home / fleet / "metadata").is_dir():
        raise InputError(f"{home / fleet}: no releases in it; expected --home of a server that released")
    return Repository(home / fleet, elsewhere=elsewhere or ())


@contextmanager
def _control(
    home: Path,
    fleet: str,
    database: str,
    host: str = "127.0.0.1",
    port: int | None = None,
    identity: Path | None = None,
) -> Iterator[ReleaseControl]:
    from server.mqtt.connector import connector
    from server.registry import Database
    from server.registry.database import location
    from server.release.rollout.control import ReleaseControl

    with closing(Database.open(location(database, home))) as db:
        yield ReleaseControl(connector(host, port or 0, identity), fleet, home, db)


def _carry_out(releases: ReleaseControl, number: int, wait_s: float) -> None:
    from edge_fl.console.progress import Progress

    with Progress() as progress:
        try:
            record = releases.carry_out(number, progress.print, wait_s, progress)
        except ConnectError as error:
            raise ConnectError(
                f"{error}; the roll-out stays wanted as it was asked for: the next server, or the same command again, carries it out"
            ) from error
    print(record.state)


def _plan(stages: str, success: float, false_abort: float, stage_wait_s: float) -> RolloutConfig:
    import msgspec

    from edge_fl.config import RolloutConfig

    try:
        tree = {
            "stages": [float(share) for share in stages.split(",")],
            "success": success,
            "stage_wait_s": stage_wait_s,
            "gates": {"false_abort": false_abort},
        }
        return msgspec.convert(tree, RolloutConfig)
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"release rollout: {error}") from error
