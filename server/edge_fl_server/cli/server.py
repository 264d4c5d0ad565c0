"""`edge-fl server run | up | worker`: train over MQTT, serve a fleet between runs, validate updates elsewhere."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from edge_fl import logs
from edge_fl.cli import App, IdentityOption, fleet_name
from edge_fl.console.output import print_status
from edge_fl.errors import ConfigError
from edge_fl.logs import LogFormat
from edge_fl_server.cli import options, user_imports
from edge_fl_server.cli.connection import connect_to
from edge_fl_server.cli.options import (
    HOME,
    RUNS,
    DatabaseOption,
    FleetOption,
    HomeOption,
    HostOption,
    PortOption,
    RunsOption,
    SetOption,
    TrackOption,
)
from edge_fl_server.recipes.recipe import with_settings

AdoptOption = Annotated[
    bool,
    typer.Option(
        "--adopt",
        rich_help_panel="Folders",
        help="Give a fleet of another registry to this one, which then publishes what it knows.",
    ),
]
WorkersOption = Annotated[
    bool, typer.Option("--workers", help="Leave validation to 'edge-fl server worker' processes.")
]
DashboardOption = Annotated[
    int | None,
    typer.Option(
        "--dashboard", metavar="N", min=0, max=65535, help="Also serve the dashboard, on this loopback port."
    ),
]
LogFormatOption = Annotated[
    LogFormat, typer.Option("--log-format", metavar="text|json", help="Format of the log on stderr.")
]


def register(app: App) -> None:
    """Add the group `server`."""
    group = app.group("server", "The server: train over MQTT, release extractors, collect reports.", "Fleet")
    group.add(run, "edge-fl server run demo --set rounds=5")
    group.add(up, "edge-fl server up --dashboard 8080")
    group.add(worker, "edge-fl server worker --database postgresql://user@host/name")


def run(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="A recipe: a TOML file, or a name of 'edge-fl recipes list'."),
    ] = "",
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST", rich_help_panel="Connection", help="The broker's host [the recipe's]."),
    ] = None,
    port: PortOption = None,
    fleet: Annotated[
        str | None,
        typer.Option(
            metavar="FLEET",
            rich_help_panel="Connection",
            help="Name of the fleet [the recipe's].",
            callback=fleet_name,
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Torch device: auto, cpu or cuda.")
    ] = None,
    settings: SetOption = None,
    takeover: Annotated[
        bool,
        typer.Option("--takeover", rich_help_panel="Connection", help="Replace a server that is online."),
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Folder of an interrupted run to resume, instead of a recipe."),
    ] = None,
    database: DatabaseOption = "",
    adopt: AdoptOption = False,
    workers: WorkersOption = False,
    track: TrackOption = None,
    runs: RunsOption = RUNS,
    home: HomeOption = HOME,
    identity: IdentityOption = None,
    dashboard: DashboardOption = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Train over MQTT, release the extractor, collect head reports; prints the folder of the results."""
    from edge_fl_server import recipes
    from edge_fl_server.runs import tracking
    from edge_fl_server.runs.results import Results

    if not (recipe or resume):
        raise ConfigError("server run: expected a recipe, such as demo, or --resume RUN")
    chosen = Results.open(resume).recipe() if resume else recipes.find(recipe)
    given = {
        "broker.host": host,
        "broker.port": port,
        "broker.fleet": fleet,
        "broker.identity": os.fspath(identity) if identity else None,
        "device": device,
    }
    chosen = with_settings(chosen, [*options.settings(given), *(settings or [])])
    trackers = tracking.find(track or [])
    connect = connect_to(chosen.broker.host, chosen.broker.port, chosen.broker.identity)

    # These import torch: invalid settings are reported before.
    from edge_fl_server import services
    from edge_fl_server.orchestrate import run as orchestrator
    from edge_fl_server.orchestrate.access import FleetAccess

    user_imports.allow()
    logs.configure(log_format)
    broker = chosen.broker
    access = FleetAccess(connect, broker.fleet, home, database, broker.identity, workers, adopt)
    identity = Path(broker.identity) if broker.identity else None
    place = services.Place(access.registry, broker.fleet, home, identity)
    with services.running(place, dashboard=dashboard, devices=chosen.source != "simulated"):
        results, outcome = orchestrator.run(
            chosen, runs, access=access, takeover=takeover, resume=resume, track=trackers
        )
        services.finished(results)
        if outcome.exhausted:
            raise outcome.exhausted
        print(results.path)


def up(
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    fleet: FleetOption = "main",
    database: DatabaseOption = "",
    adopt: AdoptOption = False,
    workers: WorkersOption = False,
    home: HomeOption = HOME,
    identity: IdentityOption = None,
    dashboard: DashboardOption = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Serve a fleet between runs, until Ctrl-C: roll-outs, releases for devices that join, reports. Runs take over while they last."""
    connect = connect_to(host, port, identity)
    from edge_fl_server import services
    from edge_fl_server.orchestrate.access import FleetAccess
    from edge_fl_server.orchestrate.serving import FleetServer
    from edge_fl_server.registry import Database

    logs.configure(log_format)
    access = FleetAccess(connect, fleet, home, database, identity or "", workers, adopt)
    with (
        closing(Database.open(access.registry)) as db,
        services.running(services.Place(access.registry, fleet, home, identity), dashboard=dashboard),
    ):
        try:
            FleetServer(access, db).serve(threading.Event())
        except KeyboardInterrupt:
            print_status(f"fleet {fleet!r}: offline")


def worker(
    database: Annotated[
        str,
        typer.Option(
            metavar="REGISTRY",
            rich_help_panel="Folders",
            envvar="EDGE_FL_DATABASE",
            help="The server's registry.",
        ),
    ],
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    fleet: FleetOption = "main",
    quarantine_after: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Rejected reports until quarantine, as in the recipe's [validation]."
        ),
    ] = 3,
    identity: IdentityOption = None,
) -> None:
    """Receive and validate reports for a server that runs with --workers, until Ctrl-C; several may run."""
    from edge_fl_server.mqtt.connector import fleet_authorities
    from edge_fl_server.mqtt.journal import Journal
    from edge_fl_server.mqtt.updates.workers import UpdateWorker
    from edge_fl_server.registry import Database, fleets

    db = Database.open(database)
    fleets.require(db, fleet)
    journal = Journal(db, fleet, quarantine_after=quarantine_after)
    connect = connect_to(host, port, identity)
    with journal, UpdateWorker(connect, journal, fleet_authorities(identity)) as worker:
        print_status(f"worker of fleet {fleet}: receiving reports")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print_status(f"{worker.received} reports received")
