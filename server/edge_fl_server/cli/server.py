"""`edge-fl server run | up | worker | backup`: train over MQTT, serve a fleet between runs, validate updates elsewhere, back up."""

import threading
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edge_fl import logs, plugins, signals
from edge_fl.cli import App
from edge_fl.console.output import print_status
from edge_fl.errors import ConfigError
from edge_fl.files.paths import text
from edge_fl.logs import LogFormat
from edge_fl.options import (
    CONNECTION,
    FOLDERS,
    BrokerAddressOptions,
    ConnectionOptions,
    argument,
    fleet_name,
    option,
)
from edge_fl_server.cli import options
from edge_fl_server.cli.options import (
    RUNS,
    FleetOption,
    RegistryOptions,
    RegistryPlace,
    RunsOption,
    SetOption,
    TrackOption,
    connect_to,
)

if TYPE_CHECKING:
    from edge_fl_server.mqtt.connector import ServerConnect
    from edge_fl_server.orchestrate.serving import FleetAccess


@dataclass(frozen=True, kw_only=True)
class RecipeBroker(ConnectionOptions):
    """The broker and the fleet of a run, which the recipe names unless an option does."""

    host: Annotated[str | None, option("--host HOST", "Host of the broker [the recipe's].", CONNECTION)] = (
        None
    )
    fleet: Annotated[
        str | None,
        option(
            "--fleet FLEET",
            "Name of the fleet; a new name creates one [the recipe's].",
            CONNECTION,
            callback=fleet_name,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServedFleet(RegistryPlace):
    """The fleet that a server serves, and where its registry is."""

    fleet: Annotated[
        str,
        option(
            "--fleet FLEET", "Name of the fleet; a new name creates one.", CONNECTION, callback=fleet_name
        ),
    ] = "main"


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """What a server does next to its runs."""

    adopt: Annotated[
        bool,
        option(
            "--adopt",
            "Give a fleet of another registry to this one, which then publishes what it knows.",
            FOLDERS,
        ),
    ] = False
    workers: Annotated[
        bool, option("--workers", "Leave validation to 'edge-fl server worker' processes.")
    ] = False
    dashboard: Annotated[
        int | None,
        option("--dashboard N", "Also serve the dashboard, on this loopback port.", min=0, max=65535),
    ] = None
    log_format: Annotated[LogFormat, option("--log-format text|json", "Format of the log on stderr.")] = (
        LogFormat.TEXT
    )

    def access(
        self, connect: "ServerConnect", fleet: str, place: RegistryOptions, identity: Path | None
    ) -> "FleetAccess":
        """How the server gets at its fleet."""
        from edge_fl_server.orchestrate.serving import FleetAccess

        return FleetAccess(connect, fleet, place.home, place.database, identity, self.workers, self.adopt)


def register(app: App) -> None:
    """Add the group `server`."""
    group = app.group("server", "The server: train over MQTT, release extractors, collect reports.", "Fleet")
    group.add(run, "edge-fl server run demo --set rounds=5")
    group.add(up, "edge-fl server up --dashboard 8080")
    group.add(backup, "edge-fl server backup fleet.tar")
    group.add(worker, "edge-fl server worker --database postgresql://user@host/name")


def run(
    recipe: Annotated[
        str, argument("RECIPE", "A recipe: a TOML file, or a name of 'edge-fl recipes list'.")
    ] = "",
    settings: SetOption = None,
    takeover: Annotated[bool, option("--takeover", "Replace a server that is online.", CONNECTION)] = False,
    resume: Annotated[
        str, option("--resume RUN", "Interrupted run to resume, instead of a recipe: its name or folder.")
    ] = "",
    track: TrackOption = None,
    runs: RunsOption = RUNS,
    *,
    broker: RecipeBroker,
    place: RegistryOptions,
    serving: ServingOptions,
) -> None:
    """Train over MQTT, release the extractor, collect head reports; prints the folder of the results."""
    from edge_fl_server import recipes
    from edge_fl_server.recipes.recipe import with_settings
    from edge_fl_server.runs import round_metrics
    from edge_fl_server.runs.results import Results, folder_of

    if not (recipe or resume):
        raise ConfigError("server run: expected a recipe, such as demo, or --resume RUN")
    resumed = folder_of(resume, runs) if resume else None
    chosen = Results.open(resumed).recipe() if resumed else recipes.find(recipe)
    given = {f"broker.{name}": value for name, value in broker.given().items()}
    chosen = with_settings(chosen, [*options.settings(given), *(settings or [])])
    trackers = round_metrics.find(track or [])
    identity = Path(chosen.broker.identity) if chosen.broker.identity else None
    connect = connect_to(
        BrokerAddressOptions(host=chosen.broker.host, port=chosen.broker.port, identity=identity)
    )

    # These import torch: invalid settings are reported before.
    from edge_fl_server import services
    from edge_fl_server.orchestrate import ending
    from edge_fl_server.orchestrate import run as orchestrator

    plugins.allow_working_folder()
    logs.configure(serving.log_format)
    access = serving.access(connect, chosen.broker.fleet, place, identity)
    with services.running(access, dashboard=serving.dashboard, devices=chosen.source != "simulated"):
        results, outcome = orchestrator.run(
            chosen,
            runs,
            access=access,
            takeover=takeover,
            resume=resumed,
            track=trackers,
            resumption=lambda run: ending.command("server run", run, access, resume=text(run.path)),
        )
        services.finished(results)
        for line in ending.lines(results, access):
            print_status(line)
        if outcome.exhausted:
            raise outcome.exhausted
        print(results.path)
        if outcome.stopped:
            raise outcome.stopped


def up(broker: BrokerAddressOptions, place: ServedFleet, serving: ServingOptions) -> None:
    """Serve a fleet between runs, until Ctrl-C: roll-outs, releases for devices that join, reports. Runs take over while they last."""
    connect = connect_to(broker)
    from edge_fl_server import services
    from edge_fl_server.orchestrate.serving import FleetServer
    from edge_fl_server.registry import Database

    logs.configure(serving.log_format)
    access = serving.access(connect, place.fleet, place, broker.identity)
    with (
        closing(Database.open(access.registry)) as db,
        services.running(access, dashboard=serving.dashboard),
        signals.serving(lambda how: print_status(f"fleet {place.fleet!r}: offline, {how}")),
    ):
        FleetServer(access, db).serve(threading.Event())


def backup(
    file: Annotated[
        Path, argument("FILE", "The archive to write (tar); it contains keys: only you can read it.")
    ],
    identities: Annotated[
        Path, option("--identities FOLDER", "Folder of the certificate authority.", FOLDERS)
    ] = Path("runs/identities"),
    *,
    place: RegistryOptions,
) -> None:
    """Write what a server must not lose into one file, also while it runs: releases with their keys, registry, certificate authority.
    'tar -xpf FILE -C runs' restores it in an empty folder.
    """
    from edge_fl_server.release import backup as backups

    for line in backups.write(file, place.home, place.location, identities):
        print_status(line)
    print(text(file))


def worker(
    database: Annotated[
        str,
        option(
            "--database REGISTRY",
            "Registry: a file, or postgresql://user@host/name; the server's.",
            FOLDERS,
            envvar="EDGE_FL_DATABASE",
        ),
    ],
    fleet: FleetOption = "main",
    quarantine_after: Annotated[
        int,
        option(
            "--quarantine-after N",
            "Rejected reports until quarantine, as in the recipe's [validation].",
            min=0,
        ),
    ] = 3,
    *,
    broker: BrokerAddressOptions,
) -> None:
    """Receive and validate reports for a server that runs with --workers, until Ctrl-C; several may run."""
    from edge_fl_server.mqtt.connector import fleet_authorities
    from edge_fl_server.mqtt.journal import Journal
    from edge_fl_server.mqtt.updates.workers import UpdateWorker
    from edge_fl_server.registry import Database, fleets

    db = Database.open(database)
    fleets.require(db, fleet)
    journal = Journal(db, fleet, quarantine_after=quarantine_after)
    connect = connect_to(broker)
    with (
        journal,
        UpdateWorker(connect, journal, fleet_authorities(broker.identity)) as worker,
        signals.serving(lambda how: print_status(f"{worker.received} reports received; {how}")),
    ):
        print_status(f"worker of fleet {fleet}: receiving reports")
        threading.Event().wait()
