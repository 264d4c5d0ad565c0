"""The recipe of a run: method, data, model and settings as given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edge_fl.errors import ConfigError
from edge_fl_lab.compare import grid
from edge_fl_lab.recipe_changes import flat, with_method
from edge_fl_lab.research.data import NOTHING_RUN, Data
from edge_fl_server import recipes
from edge_fl_server.recipes.recipe import Recipe, with_settings

MAIN = "__main__:"
Settings = Mapping[str, Any] | Sequence[str]


def recipe_of(
    base: str | Path | Recipe,
    method: str,
    data: Data,
    partition: str,
    model: str | type,
    given: Mapping[str, Any],
    settings: Settings,
) -> Recipe:
    """The recipe `base` with a method ("fedcrc:tau=0.9"; none: the recipe's), the data's and other settings. Raises InputError."""
    recipe = (
        base if isinstance(base, Recipe) else recipes.find(str(base)) if base else Recipe(name="research")
    )
    name = model if isinstance(model, str) else f"{model.__module__}:{model.__qualname__}"
    own = {**data.settings(), "model.name": name or None, **given, "source": "simulated"}
    changes = [
        *_formatted(own),
        *(grid.parse_partition(partition) if partition else ()),
        *_formatted(settings),
    ]
    if method:
        name, options = grid.parse_method(method)
        recipe = with_method(recipe, name)
        changes += grid.parse_settings(method)
        changes += _formatted({f"method.options.{key}": value for key, value in options.items()})
    recipe = with_settings(recipe, changes)
    if recipe.source != "simulated":
        raise ConfigError(f"source = {recipe.source!r}, expected simulated", NOTHING_RUN)
    return _importable(recipe)


def _importable(recipe: Recipe) -> Recipe:
    """The recipe with an engine that can build its model. Raises ConfigError."""
    if recipe.model.name.startswith(MAIN) and recipe.engine == "auto":
        return msgspec.structs.replace(recipe, engine="sequential")
    if recipe.engine in ("pool", "ray"):
        require_importable(recipe.model.name, f"engine {recipe.engine!r}")
    return recipe


def require_importable(model: str, processes: str) -> None:
    """Raise ConfigError for a model of the script or notebook, which other processes cannot import."""
    if model.startswith(MAIN):
        raise ConfigError(
            f"model {model.removeprefix(MAIN)} is defined in this script or notebook, which the processes of {processes} cannot"
            " import; expected a model in a module of its own, or a single process",
            NOTHING_RUN,
        )


def _formatted(settings: Settings) -> list[str]:
    """Settings as "key=value"; values of None are left out."""
    if isinstance(settings, str):
        raise ConfigError(f"settings {settings!r}: expected a dict, or a list of 'key=value'", NOTHING_RUN)
    if not isinstance(settings, Mapping):
        return list(settings)
    given = {key: value for key, value in flat(settings).items() if value is not None}
    return [f"{key}={json.dumps(value, default=_plain)}" for key, value in given.items()]


def _plain(value: Any) -> Any:
    """A NumPy number or array, or a path, as JSON knows them."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)
