"""The server's commands: `edge-fl server run`, `edge-fl fleet list`, `edge-fl demo`, and those of the researcher.

Nothing heavy is imported before one of them runs.
"""

from __future__ import annotations

import json
import signal
import threading
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from edge_fl import logs
from edge_fl.cli import App, Format, FormatOption, IdentityOption, fleet_name, say, show_table
from edge_fl.errors import ConfigError
from edge_fl.logs import LogFormat
from server import imports, research
from server.options import (
    HOME,
    DatabaseOption,
    FleetOption,
    HomeOption,
    HostOption,
    PortOption,
    RunsOption,
    SetOption,
    TrackOption,
)
from server.release import cli as releases
from server.view import cli as view

if TYPE_CHECKING:
    from server.wire.reader import Connect


def register(app: App) -> None:
    """Adds the groups `server`, `fleet` and `release`, the demo, and the researcher's commands."""
    server = app.group(
        "server", help="The server: train over MQTT, release extractors, collect what devices report."
    )
    server.command()(run)
    server.command()(worker)
    fleet = app.group("fleet", help="The devices that exist.")
    fleet.command("list")(list_devices)
    fleet.command()(admit)
    app.root.command()(demo)
    releases.register(app)
    research.register(app)
    view.register(app)


def run(
    recipe: Annotated[
        str, typer.Argument(help="A recipe: a TOML file, or a name of 'edge-fl recipes list'.")
    ] = "",
    host: Annotated[str | None, typer.Option(help="Where the broker is; instead of the recipe's.")] = None,
    port: PortOption = None,
    fleet: Annotated[
        str | None, typer.Option(help="The fleet's name; instead of the recipe's.", callback=fleet_name)
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where torch computes: auto, cpu, cuda.")] = None,
    settings: SetOption = None,
    takeover: Annotated[bool, typer.Option("--takeover", help="Replace a server that is online.")] = False,
    resume: Annotated[
        Path | None, typer.Option(help="The folder of a run to go on with, instead of a recipe.")
    ] = None,
    database: DatabaseOption = "",
    workers: Annotated[
        bool, typer.Option("--workers", help="Reports are taken by 'edge-fl server worker' processes.")
    ] = False,
    track: TrackOption = None,
    runs: RunsOption = Path("runs"),
    home: HomeOption = HOME,
    identity: IdentityOption = None,
    dashboard: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Serve the dashboard beside the run, on this loopback port."),
    ] = None,
    log_format: Annotated[
        LogFormat, typer.Option(help="Lines on stderr for people, or JSON.")
    ] = LogFormat.TEXT,
) -> None:
    """Train over MQTT, release the extractor, collect what heads report; prints the folder of the results."""
    from edge_fl import config
    from server import recipes
    from server.results import Results
    from server.view import track as tracking

    if not (recipe or resume):
        raise ConfigError("server run: expected a recipe, such as demo, or --resume RUN; nothing was started")
    chosen = Results.open(resume).recipe() if resume else recipes.find(recipe)
    given = {
        "broker.host": host,
        "broker.port": port,
        "broker.fleet": fleet,
        "broker.identity": str(identity) if identity else None,
        "device": device,
    }
    replaced = [f"{name}={json.dumps(value)}" for name, value in given.items() if value is not None]
    chosen = config.with_settings(chosen, [*replaced, *(settings or [])])

    trackers = tracking.find(track or [])
    connect = _connect(chosen.broker.host, chosen.broker.port, chosen.broker.identity)

    from server import fleet_run, request  # torch comes with it: wrong settings are told before
    from server.view.dashboard import child

    imports.from_here()
    logs.set_up(log_format)
    signal.signal(signal.SIGTERM, _interrupt)
    asked = request.RunRequest(chosen, connect, runs, home, takeover, resume, database, workers, trackers)
    with child.dashboard(dashboard, asked.registry, chosen.broker.fleet, home):
        print(fleet_run.run(asked))


def worker(
    database: Annotated[
        str, typer.Option(envvar="EDGE_FL_DATABASE", help="The registry that the server runs on, too.")
    ],
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    fleet: FleetOption = "main",
    quarantine_after: Annotated[int, typer.Option(min=0, help="As in the recipe's [judge].")] = 3,
    identity: IdentityOption = None,
) -> None:
    """Receive and judge reports for a server that runs with --workers, beside other workers, until Ctrl-C."""
    from server.registry import Database
    from server.wire.journal import Journal
    from server.wire.workers import Worker

    signal.signal(signal.SIGTERM, _interrupt)
    journal = Journal(Database.open(database), fleet, quarantine_after=quarantine_after)
    with journal, Worker(_connect(host, port or 0, identity), journal) as taking:
        say(f"worker of fleet {fleet}: takes reports")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            say(f"{taking.taken} reports taken")


def list_devices(
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    fleet: FleetOption = "main",
    identity: IdentityOption = None,
    database: DatabaseOption = "",
    home: HomeOption = HOME,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the devices that the broker knows of, with what each said about itself last, and when a server heard of it."""
    from server import device_list
    from server.registry import Database, devices
    from server.registry.database import place

    heard: dict[str, str] = {}
    if database or Path(place(database, home)).exists():
        with closing(Database.open(place(database, home))) as db:
            heard = {record.device: record.seen_at for record in devices.known(db, fleet)}
    found = device_list.devices(_connect(host, port or 0, identity), fleet, heard)
    show_table(found.rows, device_list.COLUMNS, format)
    if not found.online:
        say(
            f"fleet {fleet!r}: no server is online, so nobody has asked whether these devices are still there"
        )


def admit(
    device: Annotated[str, typer.Argument(help="A device in quarantine.")],
    fleet: FleetOption = "main",
    database: DatabaseOption = "",
    home: HomeOption = HOME,
) -> None:
    """End the quarantine of a device: its reports count again, and its refused ones are counted from 0."""
    from edge_fl.errors import InputError, nearest
    from server.registry import Database, devices
    from server.registry.database import place

    db = Database.open(place(database, home))
    known = {record.device: record for record in devices.known(db, fleet)}
    if device not in known:
        raise InputError(
            f"fleet {fleet!r}: no device {device!r}{nearest(device, known)}; nothing was changed"
        )
    devices.let_in(db, fleet, device)
    was = known[device].quarantine
    say(f"{device}: was in quarantine ({was}), counts again" if was else f"{device}: was in no quarantine")


def demo(
    dataset: Annotated[str, typer.Option(help="A dataset by name; digits needs no file.")] = "digits",
    data_dir: Annotated[Path, typer.Option(help="Where datasets are.")] = Path(".data"),
    devices: Annotated[int, typer.Option(min=2, help="How many simulated devices.")] = 12,
    full: Annotated[int, typer.Option(min=1, help="How many of them train; the others fit heads.")] = 4,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds, instead of the recipe's.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The broker's port; a free one by default.")
    ] = None,
    runs: RunsOption = Path("runs"),
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the devices' and the broker's folders too.")
    ] = False,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure", help="Over mTLS, with a certificate for the broker, the server and each device."
        ),
    ] = False,
    beside: Annotated[
        bool,
        typer.Option("--beside", help="With --secure: first run it in plaintext, to see what TLS costs."),
    ] = False,
) -> None:
    """See it work: a broker, a server and simulated devices learn together on this machine; takes about a minute."""
    from dataclasses import replace

    from server import demo as demos

    signal.signal(signal.SIGTERM, _interrupt)
    asked = demos.DemoOptions(dataset, data_dir, devices, full, rounds, port, runs, keep, secure)
    plain_s = demos.run(replace(asked, secure=False)).seconds if beside else None
    found = demos.run(asked)
    print(found.histogram, end="\n\n")
    show_table([*found.devices], demos.DEVICE_COLUMNS)
    print()
    show_table([*found.comparison], demos.COMPARISON_COLUMNS)
    print(f"\n{found.note}\nThe results are in {found.path}")
    print(
        f"It took {found.seconds:.1f} s" + (" over mTLS" if secure else ""),
        end="\n" if plain_s is None else ", ",
    )
    if plain_s is not None:
        print(f"{plain_s:.1f} s in plaintext: {found.seconds / plain_s:.2f} times as long")


def _connect(host: str, port: int, identity: Path | str | None) -> Connect:
    from server.wire.connector import connector

    return connector(host, port, identity)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends a run in the same order as Ctrl-C."""
    raise KeyboardInterrupt
