"""Options that several of the server's commands share; nothing heavy is imported here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edge_fl.errors import ConfigError
from edge_fl.options import CONNECTION, DATA, FOLDERS, TRAINING, argument, fleet_name, option

if TYPE_CHECKING:
    from edge_fl_server.recipes.recipe import Recipe

HOME = Path("runs/releases")
RUNS = Path("runs")

FleetOption = Annotated[str, option("--fleet FLEET", "Name of the fleet.", CONNECTION, callback=fleet_name)]
RunsOption = Annotated[Path, option("--runs FOLDER", "Folder of all results.", FOLDERS)]


@dataclass(frozen=True, kw_only=True)
class RegistryOptions:
    """Where the registry and the release keys are."""

    database: Annotated[
        str,
        option(
            "--database REGISTRY",
            "Registry: a file, or postgresql://user@host/name; by default server/registry.sqlite next to --home.",
            FOLDERS,
            envvar="EDGE_FL_DATABASE",
        ),
    ] = ""
    home: Annotated[Path, option("--home FOLDER", "Folder of the release keys and metadata.", FOLDERS)] = HOME

    @property
    def location(self) -> str:
        """The registry's file or address."""
        from edge_fl_server.registry.database import location

        return location(self.database, self.home)

    @property
    def exists(self) -> bool:
        """Whether a registry was named, or is where it is by default."""
        return bool(self.database) or Path(self.location).exists()


@dataclass(frozen=True, kw_only=True)
class RegistryPlace(RegistryOptions):
    """The fleet that a command works on, and where its registry is."""

    fleet: FleetOption = "main"


RecipeOption = Annotated[
    str, option("--recipe RECIPE", "A recipe by name or path, see 'edge-fl recipes list'.")
]
ClientsOption = Annotated[
    int | None, option("--clients N", "Number of clients that the data are split over.", DATA, min=1)
]
SplitOption = Annotated[
    str,
    option(
        "--split FILE",
        "A CSV file that assigns each sample to a client and a set, instead of drawing them; see 'simulate --save-split'.",
        DATA,
    ),
]
ModelOption = Annotated[str, option("--model MODEL", "A model by name, or package.module:Class.", TRAINING)]
RoundsOption = Annotated[int | None, option("--rounds N", "Communication rounds.", TRAINING, min=0)]
EpochsOption = Annotated[int | None, option("--epochs N", "Local epochs per round.", TRAINING, min=0)]
ScaleOption = Annotated[
    float, option("--scale SHARE", "Share of the data and of the rounds to use.", DATA, min=1e-6, max=1)
]
SetOption = Annotated[
    list[str] | None,
    option(
        "--set KEY=VALUE",
        "A setting of the recipe, such as rounds=3 or method.options.temperature=0.5; may be repeated.",
        TRAINING,
    ),
]
HeadsOption = Annotated[
    list[str] | None,
    option(
        "--head HEAD",
        "A head to fit on the final extractor too: a name of 'edge-fl heads list', or package.module:Class; may be repeated.",
    ),
]
TrackOption = Annotated[
    list[str] | None,
    option(
        "--track VIEWER",
        "Also record every round in the run's folder for a viewer: tensorboard or mlflow; may be repeated.",
    ),
]
RunArgument = Annotated[str, argument("RUN", "A run of 'edge-fl runs list', or its folder.")]
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
