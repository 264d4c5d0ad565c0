"""The built-in recipes: the demo, and the settings of the papers' tables.

FILE.toml holds the recipe FILE and, under `[cells.NAME]`, further recipes as changes to it. A cell, or a recipe of your own, can build on
any other built-in recipe instead: `base = "fedrir-fmnist-dir01"`.
"""

from functools import cache
from pathlib import Path
from typing import Any

from edge_fl import toml
from edge_fl.data.partition import DataConfig
from edge_fl.errors import ConfigError, nearest
from edge_fl.files import paths
from edge_fl_server.recipes.recipe import Recipe, convert

FOLDER = Path(__file__).parent
PAPERS = FOLDER / "papers.toml"  # the figures that the tables print; not a recipe


PARTITIONS: dict[str, tuple[str, ...]] = {
    "dirichlet": ("beta",),
    "dirichlet-clients": ("beta",),
    "pathological": ("classes_per_client",),
    "domain": (),
    "iid": (),
}
"""Kinds of partition, and the key of [data] whose number describes it."""


def names() -> list[str]:
    """The names of all built-in recipes."""
    return sorted(_built_in())


def find(recipe: str) -> Recipe:
    """Read a built-in recipe by name, or a recipe file by path. Raises ConfigError."""
    if recipe in _built_in():
        return convert(_resolved(_built_in()[recipe], recipe) | {"name": recipe}, recipe)
    if not recipe.endswith(".toml"):
        raise ConfigError(
            f"recipe {recipe!r}: unknown{nearest(recipe, names())}; expected a name of 'edge-fl recipes list' or the path of a .toml file"
        )
    return convert(_resolved(toml.read(Path(recipe)), recipe), recipe)


def title(recipe: str) -> str:
    """One line about a built-in recipe: the paper's table, and what distinguishes this cell of it."""
    return str(_built_in()[recipe]["title"])


def partition_label(data: DataConfig) -> str:
    """Format a partition, such as "dirichlet 0.1", or the name of its file."""
    if data.split:
        return f"split {paths.text(Path(data.split).stem)}"
    return " ".join([data.partition, *(f"{getattr(data, key):g}" for key in PARTITIONS[data.partition])])


@cache
def _built_in() -> dict[str, dict[str, Any]]:
    """Every built-in recipe as written, by name."""
    recipes: dict[str, dict[str, Any]] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        if path != PAPERS:
            tree = toml.read(path)
            cells = tree.pop("cells", {})
            recipes[path.stem] = tree
            recipes |= {name: {"base": path.stem, **cell} for name, cell in cells.items()}
    return recipes


def _resolved(tree: dict[str, Any], where: str) -> dict[str, Any]:
    """The settings of a recipe over those of its base."""
    settings = {key: value for key, value in tree.items() if key not in ("base", "title")}
    if "base" not in tree:
        return settings
    base = tree["base"]
    if base not in names():
        raise ConfigError(f"{where}: base = {base!r}: unknown{nearest(str(base), names())}")
    return _merged(_resolved(_built_in()[base], base), settings)


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Both trees as one; where both set a value, that of `changes` counts. Another `name` does not keep the options of the base's."""
    if changes.get("name", base.get("name")) != base.get("name"):
        base = {key: value for key, value in base.items() if key != "options"}
    merged = base | changes
    for key in base.keys() & changes.keys():
        if isinstance(base[key], dict) and isinstance(changes[key], dict):
            merged[key] = _merged(base[key], changes[key])
    return merged
