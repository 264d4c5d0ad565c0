"""The options that several of the server's commands share; nothing heavy is imported here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge_fl.cli import fleet_name

RunsOption = Annotated[Path, typer.Option("--runs", help="The folder of all results.")]
HomeOption = Annotated[
    Path, typer.Option("--home", help="Where the keys and the metadata of releases are kept.")
]
HOME = Path("runs/releases")
DatabaseOption = Annotated[
    str,
    typer.Option(
        "--database",
        envvar="EDGE_FL_DATABASE",
        help="The registry: a file, or postgresql://user@host/name; by default server/registry.sqlite beside --home.",
    ),
]
HostOption = Annotated[str, typer.Option("--host", help="Where the broker is.")]
PortOption = Annotated[
    int | None,
    typer.Option("--port", min=1, max=65535, help="The broker's port [8883 with an identity, else 1883]."),
]
FleetOption = Annotated[
    str, typer.Option("--fleet", help="The fleet's name in every topic.", callback=fleet_name)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting of the recipe, such as rounds=3 or method.options.temperature=0.5; may be repeated.",
    ),
]
TrackOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Also write every round for a viewer into the run's folder: tensorboard or mlflow; may be repeated."
    ),
]
