"""`edge-fl server run` and `edge-fl server worker`: train over MQTT, validate updates in separate processes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Annotated

import typer

from edge_fl import logs
from edge_fl.cli import App, IdentityOption, fleet_name
from edge_fl.console.output import print_status
from edge_fl.errors import ConfigError
from edge_fl.logs import LogFormat
from server.cli import user_imports
from server.cli.connection import connect_to, interrupt_on_sigterm
from server.cli.options import (
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


def register(app: App) -> None:
    """Add the group `server`."""
    group = app.group(
        "server", help="The server: train over MQTT, release extractors, collect what devices report."
    )
    group.command()(run)
    group.command()(worker)


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
    from server.runs import tracking
    from server.runs.results import Results

    if not (recipe or resume):
        raise ConfigError("server run: expected a recipe, such as demo, or --resume RUN")
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
    connect = connect_to(chosen.broker.host, chosen.broker.port, chosen.broker.identity)

    from server.dashboard import child
    from server.orchestrate import run as orchestrator
    from server.orchestrate import setup  # torch comes with it: wrong settings are told before
    from server.report import page as report

    user_imports.from_here()
    logs.configure(log_format)
    interrupt_on_sigterm()
    request = setup.RunRequest(chosen, connect, runs, home, takeover, resume, database, workers, trackers)
    with child.dashboard(dashboard, request.registry, chosen.broker.fleet, home):
        results, outcome = orchestrator.run(request)
        report.write(results)
        if outcome.exhausted:
            raise outcome.exhausted
        print(results.path)


def worker(
    database: Annotated[
        str, typer.Option(envvar="EDGE_FL_DATABASE", help="The registry that the server runs on, too.")
    ],
    host: HostOption = "127.0.0.1",
    port: PortOption = None,
    fleet: FleetOption = "main",
    quarantine_after: Annotated[int, typer.Option(min=0, help="As in the recipe's [validation].")] = 3,
    identity: IdentityOption = None,
) -> None:
    """Receive and judge reports for a server that runs with --workers, beside other workers, until Ctrl-C."""
    from server.mqtt.journal import Journal
    from server.mqtt.updates.workers import UpdateWorker
    from server.registry import Database

    interrupt_on_sigterm()
    journal = Journal(Database.open(database), fleet, quarantine_after=quarantine_after)
    with journal, UpdateWorker(connect_to(host, port or 0, identity), journal) as taking:
        print_status(f"worker of fleet {fleet}: takes reports")
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print_status(f"{taking.taken} reports taken")
