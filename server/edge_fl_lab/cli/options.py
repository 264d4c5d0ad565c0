"""Options that several of the researcher's commands share; nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edge_fl.errors import ConfigError
from edge_fl.options import DATA, DATA_DIR, TRAINING, argument, option
from edge_fl_server.cli import options
from edge_fl_server.cli.options import SetOption

if TYPE_CHECKING:
    from edge_fl_server.recipes.recipe import Recipe

RunArgument = Annotated[str, argument("RUN", "A run of 'edge-fl runs list', or its folder.")]


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """A recipe, and settings that replace its own."""

    recipe: Annotated[
        str, option("--recipe RECIPE", "A recipe by name or path, see 'edge-fl recipes list'.")
    ] = ""
    data_dir: Annotated[str, DATA_DIR] = ""
    clients: Annotated[
        int | None,
        option("--clients N", "Number of clients that the data are split over.", DATA, min=1),
    ] = None
    scale: Annotated[
        float,
        option("--scale SHARE", "Share of the data and of the rounds to use.", DATA, min=1e-6, max=1),
    ] = 1.0
    model: Annotated[str, option("--model MODEL", "A model by name, or package.module:Class.", TRAINING)] = ""
    heads: Annotated[
        list[str] | None,
        option(
            "--head HEAD",
            "A head to fit on the final extractor too: a name of 'edge-fl heads list', or package.module:Class; may be repeated.",
        ),
    ] = None
    rounds: Annotated[int | None, option("--rounds N", "Communication rounds.", TRAINING, min=0)] = None
    settings: SetOption = None

    def base(self, name: str) -> Recipe:
        """The recipe that was named, or one of defaults with this name."""
        from edge_fl_server import recipes
        from edge_fl_server.recipes.recipe import Recipe

        return recipes.find(self.recipe) if self.recipe else Recipe(name=name)

    def changes(self, **more: object) -> list[str]:
        """The settings that were given, "key=value"; `more` are those of further options, with "__" for the dots of a key."""
        given = {
            "data.data_dir": self.data_dir,
            "data.clients": self.clients,
            "model.name": self.model,
            "heads": self.heads,
            "rounds": self.rounds,
            **{key.replace("__", "."): value for key, value in more.items()},
        }
        return [*options.settings(given), *(self.settings or [])]

    def applied(self, recipe: Recipe, changes: list[str], command: str) -> Recipe:
        """The recipe with these changes and scaled, if all its clients are simulated. Raises ConfigError."""
        from edge_fl_lab.recipe_changes import scaled
        from edge_fl_server.recipes.recipe import with_settings

        changed = simulated(with_settings(recipe, ["source=simulated", *changes]), command)
        if changed.data.split and self.clients:
            raise ConfigError(f"--clients: the clients are those of data.split, {changed.data.split}")
        return scaled(changed, self.scale)


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
