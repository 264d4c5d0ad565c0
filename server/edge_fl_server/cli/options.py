"""Options that several of the server's commands share; nothing heavy is imported here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from edge_fl.options import CONNECTION, FOLDERS, TRAINING, fleet_name, option

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


SetOption = Annotated[
    list[str] | None,
    option(
        "--set KEY=VALUE",
        "A setting of the recipe, such as rounds=3 or method.options.temperature=0.5; may be repeated.",
        TRAINING,
    ),
]
TrackOption = Annotated[
    list[str] | None,
    option(
        "--track VIEWER",
        "Also record every round in the run's folder for a viewer: tensorboard or mlflow; may be repeated.",
    ),
]


def settings(values: Mapping[str, object]) -> list[str]:
    """Format the options that were given as settings of a recipe, "key=value"."""
    given = {key: value for key, value in values.items() if value not in ("", None)}
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()]
