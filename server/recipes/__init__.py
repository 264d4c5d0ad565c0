"""The recipes that come with edge-fl, one TOML each: the demo, and the settings of the papers' tables."""

from __future__ import annotations

from pathlib import Path

from edge_fl import config
from edge_fl.config import Recipe
from edge_fl.errors import ConfigError, nearest

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Every recipe that `find` knows by name."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find(recipe: str) -> Recipe:
    """A recipe by its name here, or by the path of a TOML file. Raises ConfigError."""
    if recipe in names():
        return config.load(FOLDER / f"{recipe}.toml")
    if not recipe.endswith(".toml"):
        raise ConfigError(f"recipe {recipe!r}: unknown{nearest(recipe, names())}, and not the path of a .toml file; nothing was started")
    return config.load(Path(recipe))
