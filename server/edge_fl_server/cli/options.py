"""Options that several of the server's commands share; nothing heavy is imported here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_fl.cli import fleet_name
from edge_fl.errors import ConfigError

if TYPE_CHECKING:
    from edge_fl_server.recipes.recipe import Recipe

HOME = Path("runs/releases")
RUNS = Path("runs")

RunsOption = Annotated[
    Path, typer.Option("--runs", metavar="FOLDER", rich_help_panel="Folders", help="Folder of all results.")
]
HomeOption = Annotated[
    Path,
    typer.Option(
        "--home", metavar="FOLDER", rich_help_panel="Folders", help="Folder of the release keys and metadata."
    ),
]
DatabaseOption = Annotated[
    str,
    typer.Option(
        "--database",
        metavar="REGISTRY",
        rich_help_panel="Folders",
        envvar="EDGE_FL_DATABASE",
        help="Registry: a file, or postgresql://user@host/name; by default server/registry.sqlite next to --home.",
    ),
]
HostOption = Annotated[
    str, typer.Option("--host", metavar="HOST", rich_help_panel="Connection", help="The broker's host.")
]
PortOption = Annotated[
    int | None,
    typer.Option(
        "--port",
        metavar="N",
        rich_help_panel="Connection",
        min=1,
        max=65535,
        help="The broker's port [8883 with an identity, else 1883].",
    ),
]
FleetOption = Annotated[
    str,
    typer.Option(
        "--fleet",
        metavar="FLEET",
        rich_help_panel="Connection",
        help="Name of the fleet.",
        callback=fleet_name,
    ),
]

RecipeOption = Annotated[
    str,
    typer.Option("--recipe", metavar="RECIPE", help="A recipe by name or path, see 'edge-fl recipes list'."),
]
DataDirOption = Annotated[
    str,
    typer.Option(
        "--data-dir", metavar="FOLDER", rich_help_panel="Data", help="Folder of the datasets' .npz files."
    ),
]
ClientsOption = Annotated[
    int | None,
    typer.Option(
        "--clients",
        metavar="N",
        rich_help_panel="Data",
        min=1,
        help="Number of clients that the data are split over.",
    ),
]
SplitOption = Annotated[
    str,
    typer.Option(
        "--split",
        metavar="FILE",
        rich_help_panel="Data",
        help="A CSV file that assigns each sample to a client and a set, instead of drawing them; see 'simulate --save-split'.",
    ),
]
ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="MODEL",
        rich_help_panel="Training",
        help="A model by name, or package.module:Class.",
    ),
]
RoundsOption = Annotated[
    int | None,
    typer.Option("--rounds", metavar="N", rich_help_panel="Training", min=0, help="Communication rounds."),
]
EpochsOption = Annotated[
    int | None,
    typer.Option("--epochs", metavar="N", rich_help_panel="Training", min=0, help="Local epochs per round."),
]
ScaleOption = Annotated[
    float,
    typer.Option(
        "--scale",
        metavar="SHARE",
        rich_help_panel="Data",
        min=1e-6,
        max=1,
        help="Share of the data and of the rounds to use.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        rich_help_panel="Training",
        help="A setting of the recipe, such as rounds=3 or method.options.temperature=0.5; may be repeated.",
    ),
]
HeadsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--head",
        metavar="HEAD",
        help="A head to fit on the final extractor too: a name of 'edge-fl heads list', or package.module:Class; may be repeated.",
    ),
]
TrackOption = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="VIEWER",
        help="Also record every round in the run's folder for a viewer: tensorboard or mlflow; may be repeated.",
    ),
]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run of 'edge-fl runs list', or its folder.")
]
BETA_HELP = "Dirichlet concentration; smaller values make clients more different."


def settings(values: Mapping[str, object]) -> list[str]:
    """Format the options that were given as settings of a recipe, "key=value"."""
    given = {key: value for key, value in values.items() if value not in ("", None)}
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()]


def simulated(recipe: Recipe, command: str) -> Recipe:
    """The recipe, if all its clients are simulated. Raises ConfigError."""
    if recipe.source != "simulated":
        raise ConfigError(
            f"source = {recipe.source!r}: {command} trains all clients in this process, no device takes part;"
            " expected simulated, or 'edge-fl server run' for devices"
        )
    return recipe


def run_folder(run: str, runs: Path) -> Path:
    """The folder of a run given by name or path."""
    return Path(run) if Path(run).is_dir() else runs / run
