"""The recipes that come with edge-fl, one TOML each: the demo, and the settings of the papers' tables.

A file may build on another one here: `base = "fedrir"` in its first line takes that recipe's values wherever the file says nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_fl import config
from edge_fl.config import Recipe
from edge_fl.errors import ConfigError, nearest

FOLDER = Path(__file__).parent
PAPERS = FOLDER / "papers.toml"  # what the tables print; not a recipe


def names() -> list[str]:
    """Every recipe that `find` knows by name."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if path != PAPERS)


def find(recipe: str) -> Recipe:
    """A recipe by its name here, or by the path of a TOML file. Raises ConfigError."""
    if recipe in names():
        return config.convert(_tree(FOLDER / f"{recipe}.toml") | {"name": recipe}, recipe)
    if not recipe.endswith(".toml"):
        raise ConfigError(
            f"recipe {recipe!r}: unknown{nearest(recipe, names())}; expected a name of 'edge-fl recipes list' or the path of a .toml file;"
            " nothing was started"
        )
    return config.convert(_tree(Path(recipe)), recipe)


def title(recipe: str) -> str:
    """The first line of a recipe that is known by name: which table it is of, and what is special about it."""
    first = (FOLDER / f"{recipe}.toml").read_text("utf-8").partition("\n")[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def _tree(path: Path) -> dict[str, Any]:
    tree = config.read(path)
    base = tree.pop("base", None)
    if base is None:
        return tree
    if base not in names():
        raise ConfigError(f"{path}: base = {base!r}: unknown{nearest(str(base), names())}")
    return _over(_tree(FOLDER / f"{base}.toml"), tree)


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both tables as one; where both say something, `above` holds."""
    merged = below | above
    for key in below.keys() & above.keys():
        if isinstance(below[key], dict) and isinstance(above[key], dict):
            merged[key] = _over(below[key], above[key])
    return merged
